"""Frozen weights in fewer bits, through transformers' quantisation configs: the base of a LoRA student, or a teacher."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from iwopd.models import ModelError

PACKAGES = {"4bit": "bitsandbytes", "8bit": "bitsandbytes", "int8": "torchao"}
"""What each kind needs."""
EXTRAS = {"bitsandbytes": "qlora", "torchao": "torchao"}
"""The extra of this package that installs it."""


def missing_package(kind: str) -> str | None:
    """The package that a kind needs and that is not installed."""
    package = PACKAGES.get(kind)
    return package if package is not None and importlib.util.find_spec(package) is None else None


def quantization(kind: str, setting: str) -> Any:
    """Transformers' quantisation config of a kind; None for 'none'. `setting` is what messages call it."""
    if kind == "none":
        return None
    if (package := missing_package(kind)) is not None:
        gpu = " and a GPU" if package == "bitsandbytes" else ""
        raise ModelError(
            f"{setting} = {kind!r} needs the package {package}{gpu}: pip install 'iwopd[{EXTRAS[package]}]', or leave "
            f"{setting} out (weights as they are)"
        )
    if PACKAGES[kind] == "torchao":
        return _torchao()
    from transformers import BitsAndBytesConfig

    build: Any = BitsAndBytesConfig
    if kind == "8bit":
        return build(load_in_8bit=True)
    return build(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )


def _torchao() -> Any:
    """Weights only: activations keep their precision, and the output matrix is left as it is.

    Its int4 kernels need another package that runs on GPUs only, so they are not offered.
    """
    from transformers import TorchAoConfig

    ao: Any = importlib.import_module("torchao.quantization")
    build: Any = TorchAoConfig
    return build(ao.Int8WeightOnlyConfig())
