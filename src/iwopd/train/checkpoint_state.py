"""The state of training, written to files and read back bit for bit: weights, optimizer, random generators.

Tensors go to safetensors, everything else to JSON. There is no pickle, so reading runs no code.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from iwopd.adapters import adapter_tensors, base_fingerprint, has_adapter
from iwopd.errors import UserError
from iwopd.filesystem import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)
BASE = "base.json"
"""Next to an adapter: which frozen weights it belongs to."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be written, or does not fit what it is loaded into."""


def tensor_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Bytes of the tensors of model and optimizer, tied ones once: about the size of a checkpoint."""
    weights = {_memory(tensor): tensor.nbytes for tensor in _saved_tensors(model).values()}
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    return sum([*weights.values(), *(tensor.nbytes for tensor in state)])


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
    saved = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
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


# --- optimizer ------------------------------------------------------------------------------------------------------


def write_optimizer(folder: Path, optimizer: Optimizer) -> None:
    """Write the optimizer's state; parameters are numbered 0, 1, ..."""
    tensors: dict[str, Tensor] = {}
    full = optimizer.state_dict()
    values = {
        **_describe(optimizer),
        "state": {str(i): _to_json(f"state.{i}", entry, tensors) for i, entry in full["state"].items()},
        "param_groups": _to_json("param_groups", full["param_groups"], tensors),
    }
    save_file(_separate(tensors), folder / "optimizer.safetensors")
    (folder / "optimizer.json").write_text(json.dumps(values), encoding="utf-8")


def load_optimizer(folder: Path, optimizer: Optimizer) -> None:
    """Give `optimizer` the saved hyperparameters and state, each tensor in the dtype it was saved in."""
    saved = read_json(folder / "optimizer.json")
    _check_fit(saved, _describe(optimizer), folder / "optimizer.json")
    mapped = load_file(folder / "optimizer.safetensors")
    tensors = {name: tensor.clone() for name, tensor in mapped.items()}  # not backed by the file, which may be deleted
    state = {int(index): _from_json(values, tensors) for index, values in saved["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": _from_json(saved["param_groups"], tensors)})
    # torch casts floating-point state to the dtype of its parameter, which loses bits if the state was wider.
    for index, parameter in enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]):
        for key, value in state.get(index, {}).items():
            loaded = optimizer.state[parameter][key]
            if isinstance(value, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device)


def _describe(optimizer: Optimizer) -> dict[str, Any]:
    """What must agree between the saved optimizer and the one it is loaded into."""
    inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
    return {
        "class": type(inner).__name__,
        "shapes": [[list(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups],
    }


def _check_fit(saved: Mapping[str, Any], live: Mapping[str, Any], where: Path) -> None:
    if saved["class"] != live["class"]:
        raise CheckpointError(f"{where} is the state of {saved['class']}, the optimizer is {live['class']}: use the same one")
    if len(saved["shapes"]) != len(live["shapes"]):
        raise CheckpointError(
            f"{where} has {len(saved['shapes'])} parameter groups, the optimizer has {len(live['shapes'])}: "
            "build the groups as they were when the checkpoint was saved"
        )
    for group, (old, new) in enumerate(zip(saved["shapes"], live["shapes"], strict=True)):
        if len(old) != len(new):
            raise CheckpointError(
                f"parameter group {group} has {len(old)} parameters in {where}, {len(new)} in the optimizer: "
                "the same parameters must be trained"
            )
        for index, (before, now) in enumerate(zip(old, new, strict=True)):
            if before != now:
                raise CheckpointError(
                    f"parameter {index} of group {group} has shape {before} in {where}, {now} in the optimizer: "
                    "give it the parameters of the same model in the same order"
                )


def _to_json(name: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """`value` for JSON: tensors move to `tensors` and are replaced by their names; tuples stay tuples."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, tuple):
        return {"tuple": [_to_json(f"{name}.{i}", item, tensors) for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [_to_json(f"{name}.{i}", item, tensors) for i, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value) and not value.keys() & {"tensor", "tuple"}:
        return {key: _to_json(f"{name}.{key}", item, tensors) for key, item in value.items()}
    if value is None or isinstance(value, str | int | float):
        return value
    raise CheckpointError(f"the optimizer's {name} is a {type(value).__name__}, which a checkpoint cannot hold: use another")


def _from_json(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_from_json(item, tensors) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"tensor"}:
            return tensors[value["tensor"]]
        if value.keys() == {"tuple"}:
            return tuple(_from_json(item, tensors) for item in value["tuple"])
        return {key: _from_json(item, tensors) for key, item in value.items()}
    return value


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, without shared memory, as safetensors requires."""
    result: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage()
        if storage.nbytes() != plain.nbytes or storage.data_ptr() in seen:
            plain = plain.clone()
        seen.add(plain.untyped_storage().data_ptr())
        result[name] = plain
    return result


# --- random generators ----------------------------------------------------------------------------------------------


def write_rng(folder: Path) -> None:
    """Write the states of the global generators of torch, Python and numpy."""
    devices = _cuda_devices()
    cuda = {f"cuda.{device}": torch.cuda.get_rng_state(device) for device in range(devices)}
    tensors = {"torch": torch.get_rng_state(), **cuda}
    numpy_state: Any = None
    if "numpy" in sys.modules:  # if it is not imported, nothing has been drawn from it
        import numpy as np

        numpy_state = np.random.get_state(legacy=False)
        numpy_state["state"] = {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}
    values = {"python": random.getstate(), "numpy": numpy_state, "cuda_devices": devices}
    save_file(tensors, folder / "rng.safetensors")
    (folder / "rng.json").write_text(json.dumps(values), encoding="utf-8")


def restore_rng(folder: Path) -> None:
    values = read_json(folder / "rng.json")
    tensors = load_file(folder / "rng.safetensors")
    torch.set_rng_state(tensors["torch"])
    version, internal, gauss_next = values["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if values["numpy"] is not None:
        import numpy as np

        np.random.set_state(values["numpy"])
    saved, here = values["cuda_devices"], _cuda_devices()
    if saved != here:
        devices = f"{saved} CUDA devices, this machine has {here}"
        log.warning("%s holds the random state of %s: the run continues with other random numbers", folder, devices)
    for device in range(min(saved, here)):
        torch.cuda.set_rng_state(tensors[f"cuda.{device}"], device)


def _cuda_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
