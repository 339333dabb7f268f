"""The moving average of the student's weights, as a model that scores.

Of what is trained it has one copy; frozen weights are the student's own tensors, so with an adapter the copy is the adapter's.
Weights in half precision are averaged in float32, as they are trained (`weights`): most steps of an average are smaller than
half of their last bit. The model that scores has the rounded average.

The learner moves it after every optimizer step that was taken, and nobody else does.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from iwopd.algo.averages import move_average
from iwopd.train.checkpoint_state import CheckpointError
from iwopd.train.weights import HALF

TENSORS = "average.safetensors"
"""In a checkpoint; tensors by the names of the student's parameters."""


class Average:
    """theta_ema of one run."""

    def __init__(self, student: nn.Module, decay: float, device: str | None = None) -> None:
        """Begins as the student of this moment, before anything was built on its modules. device: None is the student's."""
        self.decay = decay
        self.model: Any = _copied(student, device)
        """In eval mode, without gradients."""
        copies = dict(self.model.named_parameters())
        self._scored = {name: copies[name] for name, one in student.named_parameters() if one.requires_grad}
        self.tensors: Mapping[str, Tensor] = {
            name: one.detach().float() if one.dtype in HALF else one.detach() for name, one in self._scored.items()
        }
        """The average by the names of the student's trained parameters, in their order; in float32, or that of the model."""

    def follow(self, weights: Iterable[Tensor]) -> None:
        """After an optimizer step: the trained weights in their order, as the optimizer has them."""
        for average, now in zip(self.tensors.values(), weights, strict=True):
            move_average(average, now.detach(), self.decay)
        self._round()

    @torch.no_grad()
    def restart(self, weights: Iterable[Tensor]) -> None:
        """Begin again, at these weights."""
        for average, now in zip(self.tensors.values(), weights, strict=True):
            average.copy_(now)
        self._round()

    @property
    def nbytes(self) -> int:
        """Of its file in a checkpoint."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, folder: Path) -> None:
        save_file({name: tensor.cpu().contiguous() for name, tensor in self.tensors.items()}, folder / TENSORS)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """What `write` wrote, bit for bit. Names and shapes must agree, or nothing is touched."""
        saved = load_file(folder / TENSORS)
        for name in saved.keys() ^ self.tensors.keys():
            raise CheckpointError(f"{folder / TENSORS} is the average of another student: one of them only has {name}")
        for name, tensor in saved.items():
            if tensor.shape != self.tensors[name].shape:
                raise CheckpointError(
                    f"{name} has shape {list(tensor.shape)} in {folder / TENSORS}, {list(self.tensors[name].shape)} in the "
                    "model: build the model as it was when the checkpoint was saved"
                )
        for name, tensor in saved.items():
            self.tensors[name].copy_(tensor)
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for name, parameter in self._scored.items():
            if parameter.dtype in HALF:
                parameter.copy_(self.tensors[name])


def _copied(student: nn.Module, device: str | None) -> nn.Module:
    """The student with trained weights of its own; frozen ones are shared, if they lie on the device."""
    here = next(student.parameters()).device
    place = here if device is None else torch.device(device)
    known: dict[int, Any] = {}
    for one in student.parameters():
        own = one.requires_grad or one.device != place
        known[id(one)] = nn.Parameter(one.detach().to(place, copy=True), requires_grad=False) if own else one
    model = copy.deepcopy(student, known)
    return (model if place == here else model.to(place)).eval()  # its buffers; a quantised model refuses to be moved
