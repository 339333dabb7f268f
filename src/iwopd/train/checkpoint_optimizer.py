"""The optimizer's state and the float32 masters of weights in half precision, written to files and read back bit for bit.

Parameters are numbered 0, 1, ... and their tensors are whole, whatever number of processes had a part of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from iwopd.filesystem import read_json
from iwopd.train.checkpoint_state import CheckpointError
from iwopd.train.sharding import part_like, whole

TENSORS, VALUES = "optimizer.safetensors", "optimizer.json"
Masters = Mapping[int, nn.Parameter]
"""By the number of the parameter."""


@dataclass(frozen=True)
class OptimizerState:
    """What a checkpoint holds of an optimizer."""

    values: Mapping[str, Any]
    """For JSON; tensors are replaced by their names."""
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, optimizer: Optimizer, masters: Masters | None = None, *, keep: bool = True) -> Self:
        """The state of this moment. Of sharded tensors every process makes the whole ones, one at a time; `keep`: here."""
        tensors: dict[str, Tensor] = {}
        full = optimizer.state_dict()
        values = {
            **_describe(optimizer),
            "state": {str(i): _to_json(f"state.{i}", entry, tensors) for i, entry in full["state"].items()},
            "param_groups": _to_json("param_groups", full["param_groups"], tensors),
            "masters": sorted(masters or {}),
        }
        tensors |= {f"masters.{i}": master for i, master in (masters or {}).items()}
        made = {name: whole(tensor, keep=keep) for name, tensor in tensors.items()}
        return cls(values, {name: tensor for name, tensor in made.items() if tensor is not None})

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, folder: Path) -> None:
        save_file(_separate(self.tensors), folder / TENSORS)
        (folder / VALUES).write_text(json.dumps(self.values), encoding="utf-8")


def load_optimizer(folder: Path, optimizer: Optimizer, masters: Masters | None = None) -> None:
    """Give `optimizer` the saved hyperparameters and state, each tensor in the dtype it was saved in, and `masters` theirs."""
    saved = read_json(folder / VALUES)
    _check_fit(saved, _describe(optimizer), folder / VALUES)
    mapped = load_file(folder / TENSORS)
    _load_masters(saved.get("masters", []), mapped, masters or {}, folder)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors = {name: _own(name, tensor, parameters) for name, tensor in mapped.items() if not name.startswith("masters.")}
    state = {int(index): _from_json(values, tensors) for index, values in saved["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": _from_json(saved["param_groups"], tensors)})
    # torch casts floating-point state to the dtype of its parameter, which loses bits if the state was wider.
    for index, parameter in enumerate(parameters):
        for key, value in state.get(index, {}).items():
            loaded = optimizer.state[parameter][key]
            if isinstance(value, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device)


@torch.no_grad()
def _load_masters(saved: Sequence[int], tensors: Mapping[str, Tensor], masters: Masters, folder: Path) -> None:
    if masters.keys() != set(saved):
        raise CheckpointError(
            f"{folder} holds float32 copies of {len(saved)} weights, and {len(masters)} are trained in half precision: it is "
            f"of another precision, or of a version that had no such copies. Start a new run from {folder / 'model'}"
        )
    for index, master in masters.items():
        master.copy_(part_like(tensors[f"masters.{index}"], master))


def _own(name: str, tensor: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """A tensor that is not backed by the file, which may be deleted; of a moment, the part that this process has."""
    kind, _, rest = name.partition(".")
    parameter = parameters[int(rest.partition(".")[0])] if kind == "state" else None
    return tensor.clone() if parameter is None or tensor.shape != parameter.shape else part_like(tensor, parameter)


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
