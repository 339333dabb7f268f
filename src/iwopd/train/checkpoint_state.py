"""The state of training, written to files and read back bit for bit: weights and random generators.

The optimizer's has a module of its own, `checkpoint_optimizer`.
Tensors go to safetensors, everything else to JSON. There is no pickle, so reading runs no code.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from iwopd.adapters import adapter_tensors, base_fingerprint, has_adapter
from iwopd.devices import rng_states, set_rng_states
from iwopd.errors import UserError
from iwopd.filesystem import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)
BASE = "base.json"
"""Next to an adapter: which frozen weights it belongs to."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be written, or does not fit what it is loaded into."""


def model_bytes(model: nn.Module) -> int:
    """Bytes of the tensors that a checkpoint holds of a model, tied ones once."""
    return sum({_memory(tensor): tensor.nbytes for tensor in _saved_tensors(model).values()}.values())


# --- model ----------------------------------------------------------------------------------------------------------


def write_model(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, card: str | None = None
) -> None:
    """Write a folder for `from_pretrained` and `load_weights`; fails now if it could not be loaded again.

    Of a model with an adapter: the adapter, and the fingerprint of its frozen weights. `card` is the README.
    """
    with _no_progress_bars():
        # The model's own tensor names, not those of an older file layout, so that loading needs no conversion.
        model.save_pretrained(folder, save_original_format=False)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if has_adapter(model):
        (folder / BASE).write_text(json.dumps({"fingerprint": base_fingerprint(model)}), encoding="utf-8")
    if card is not None:
        (folder / "README.md").write_text(card, encoding="utf-8")
    written: list[str] = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            written.extend(file.keys())
    _targets(model, written, where="what save_pretrained wrote")


def load_weights(folder: Path, model: nn.Module) -> None:
    """Copy the weights into `model`. Names, shapes and dtypes must agree, or nothing is touched."""
    _check_base(folder, model)
    saved: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found = load_file(file)
        if twice := sorted(found.keys() & saved.keys()):
            raise CheckpointError(f"{file} holds {twice[0]}, which another file in {folder} holds, too: move one elsewhere")
        saved |= found
    targets = _targets(model, saved, where=str(folder))
    for name, tensor in saved.items():
        target = targets[name]
        if target.shape != tensor.shape or target.dtype != tensor.dtype:
            raise CheckpointError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} in {folder}, but {target.dtype} "
                f"{list(target.shape)} in the model: build the model as it was when the checkpoint was saved"
            )
    with torch.no_grad():
        for name, tensor in saved.items():
            targets[name].copy_(tensor)


def _targets(model: nn.Module, names: Iterable[str], *, where: str) -> dict[str, Tensor]:
    """The model's tensor for each saved name. Every tensor of the model must occur exactly once, tied ones as one."""
    live = _saved_tensors(model)
    names = sorted(names)
    if unknown := [name for name in names if name not in live]:
        raise CheckpointError(f"{where} has {len(unknown)} tensors that the model does not have, the first is {unknown[0]}")
    met: dict[object, str] = {}
    for name in names:
        other = met.setdefault(_memory(live[name]), name)
        if other != name:
            raise CheckpointError(f"{where} has both {other} and {name}, which the model ties: build it with untied weights")
    if missing := [name for name in live if _memory(live[name]) not in met]:
        raise CheckpointError(
            f"{where} lacks {len(missing)} tensors of the model, the first is {missing[0]}: the checkpoint is of another "
            "model, of one that ties these weights, or of another adapter"
        )
    return {name: live[name] for name in names}


def _saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that a checkpoint holds, by their names in its files: the whole model, or its adapter."""
    return adapter_tensors(model) if has_adapter(model) else model.state_dict(keep_vars=True)


def _check_base(folder: Path, model: nn.Module) -> None:
    """An adapter is loaded only onto the frozen weights that it was trained on."""
    if (folder / BASE).exists() != has_adapter(model):
        holds, wants = ("an adapter", "a whole model") if (folder / BASE).exists() else ("a whole model", "an adapter")
        raise CheckpointError(f"{folder} holds {holds}, but {wants} is trained: set lora.rank as it was, or start a new run")
    if has_adapter(model) and read_json(folder / BASE)["fingerprint"] != base_fingerprint(model):
        raise CheckpointError(
            f"the adapter in {folder} was trained on other frozen weights than those that were loaded: "
            "load the student as it was (same files, same dtype), or start a new run"
        )


def _memory(tensor: Tensor) -> object:
    """A key that is equal for tied tensors and different for others."""
    if tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Without transformers' progress bar for every save."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


# --- random generators ----------------------------------------------------------------------------------------------


def write_rng(folder: Path) -> None:
    """Write the states of the global generators of torch (the accelerators' too), Python and numpy."""
    tensors = {"torch": torch.get_rng_state(), **rng_states()}
    numpy_state: Any = None
    if "numpy" in sys.modules:  # if it is not imported, nothing has been drawn from it
        import numpy as np

        numpy_state = np.random.get_state(legacy=False)
        numpy_state["state"] = {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}
    values = {"python": random.getstate(), "numpy": numpy_state}
    save_file(tensors, folder / "rng.safetensors")
    (folder / "rng.json").write_text(json.dumps(values), encoding="utf-8")


def restore_rng(folder: Path) -> None:
    values = read_json(folder / "rng.json")
    tensors = load_file(folder / "rng.safetensors")
    torch.set_rng_state(tensors.pop("torch"))
    version, internal, gauss_next = values["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if values["numpy"] is not None:
        import numpy as np

        np.random.set_state(values["numpy"])
    here = rng_states().keys()
    if tensors.keys() != here:
        devices = f"the devices {sorted(tensors)}, this machine has {sorted(here)}"
        log.warning("%s holds the random state of %s: the run continues with other random numbers", folder, devices)
    set_rng_states({name: state for name, state in tensors.items() if name in here})
