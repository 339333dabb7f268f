"""Checks of installed packages and of the processor."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator

import torch

from iwopd.config import Config, ConfigError
from iwopd.quantization import EXTRAS, PACKAGES
from iwopd.train.doctor.findings import Finding, failure, passed
from iwopd.train.ranks import Launched
from iwopd.train.teachers import check_teacher_device

BFLOAT16 = """
import torch
with torch.no_grad():
    torch.nn.Linear(64, 64, dtype=torch.bfloat16)(torch.ones(2, 32, 64, dtype=torch.bfloat16))
"""
"""A product large enough for the processor's matrix units."""


def check_packages(config: Config) -> Iterator[Finding]:
    """The extras that the recipe needs."""
    models = config.models
    names = [models.student, models.teacher, models.reference]
    files = [models.student_gguf_file, models.teacher_gguf_file, models.reference_gguf_file]
    kinds = [PACKAGES.get(kind) for kind in (config.lora.quantize, models.teacher_quantize)]
    needed = {
        "peft": ("lora", config.lora.rank > 0),
        **{package: (extra, package in kinds) for package, extra in EXTRAS.items()},
        "gguf": ("gguf", any(files) or any(str(name).endswith(".gguf") for name in names)),
    }
    for package, (extra, wanted) in needed.items():
        if wanted and importlib.util.find_spec(package) is None:
            message = f"this recipe needs {package}, which is not installed"
            yield failure("packages", message, f"install it: pip install 'iwopd[{extra}]'")


def check_ranks(config: Config, ranks: Launched) -> Iterator[Finding]:
    """Settings that do not go with several processes."""
    try:
        check_teacher_device(config, ranks.here)
    except ConfigError as error:
        yield failure("processes", str(error), "choose one of these")


def check_processor(config: Config) -> Iterator[Finding]:
    """bfloat16 on a CPU, in a separate process: a virtual machine that advertises AMX but forbids it kills the process."""
    dtypes = {config.models.dtype, config.models.teacher_dtype}
    if torch.cuda.is_available() or ("bfloat16" not in dtypes and config.precision != "bf16"):
        return
    done = subprocess.run([sys.executable, "-c", BFLOAT16], capture_output=True, timeout=300)
    if done.returncode:
        yield failure(
            "processor",
            f"a bfloat16 product kills the process here (exit code {done.returncode}): the machine advertises instructions "
            "that it does not allow",
            "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment, or load in float32",
        )
    else:
        yield passed("processor", "bfloat16 products work")
