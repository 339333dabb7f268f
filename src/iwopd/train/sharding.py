"""Sharded training (FSDP2): weights, gradients and moments are spread over the processes, each has one part of every tensor.

The update runs a copy of the student whose weights are gathered layer by layer. Everything else (sampling, scores, evaluation,
the files of a checkpoint) works with the student itself, which stays plain and whole on every process: processes write
different numbers of tokens, and an exchange inside would wait for ever. During the update the student's memory is given back;
afterwards it is filled from the shards, a tensor at a time.

Where something lives changes, and nothing that is computed: weights are gathered in the student's own precision. Trained
weights in half precision have float32 shards, which are their masters (`weights`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from iwopd.errors import UserError
from iwopd.lm import ResponseModel
from iwopd.train.ranks import Ranks
from iwopd.train.weights import HALF, Weights, trained


class ShardingError(UserError, ValueError):
    """A student whose training cannot be sharded, with the reason."""


class ShardedWeights(Weights):
    """The trained weights of a student of which every process holds a part."""

    in_step = True

    def __init__(self, lm: ResponseModel, ranks: Ranks) -> None:
        _refuse(lm)
        self.ranks, self.student = ranks, lm.model
        self.lm = copy.copy(lm)  # with all that was found out about the model
        self.lm.model = _without_weights(lm.model)
        self.parameters, self.masters = [], {}
        for parameter in self.student.parameters():
            _give_own_storage(parameter)

    @torch.no_grad()
    def adopt(self, loss: nn.Module) -> None:
        """Shard the model layer by layer, and what belongs to no layer with `loss`: it is whole until the loss is known."""
        half = {parameter.dtype for parameter in trained(self.student)} & set(HALF)
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if half:
            policy = MixedPrecisionPolicy(param_dtype=half.pop(), reduce_dtype=torch.float32, cast_forward_inputs=False)
        mesh = init_device_mesh(next(self.student.parameters()).device.type, (self.ranks.count,))
        weights = dict(zip(self.lm.model.parameters(), self.student.parameters(), strict=True))
        for unit in (*_layers(self.lm.model), loss):
            _fill(unit, weights)
            sharded: Any = fully_shard(unit, mesh=mesh, mp_policy=policy)
            sharded.set_gradient_divide_factor(1.0)  # the loss has one denominator: gradients are summed
            sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other
            sharded.set_reduce_scatter_unused_params(True)  # experts that only some processes used
        self.parameters = trained(self.lm.model)
        self.masters = dict(enumerate(self.parameters)) if policy.param_dtype else {}

    @contextmanager
    def updating(self) -> Iterator[None]:
        for parameter in self.student.parameters():
            parameter.untyped_storage().resize_(0)
        yield
        with torch.no_grad():
            for parameter, shard in self._pairs():
                parameter.untyped_storage().resize_(parameter.nbytes)
                parameter.copy_(shard.to(parameter.dtype).full_tensor())

    def current(self) -> Iterator[Tensor]:
        for shard in self.parameters:
            full = whole(shard.detach())
            assert full is not None
            yield full

    def sum_gradients(self) -> None:
        """Every backward pass has added up the gradients of all processes."""

    def gradient_norm(self) -> Tensor:
        gradients: list[Any] = [one.grad for one in self.parameters if one.grad is not None]
        squared = torch.nn.utils.get_total_norm([gradient.to_local() for gradient in gradients]).square()
        dist.all_reduce(squared)
        return squared.sqrt()

    def stepped(self) -> None:
        """Weights are gathered from the shards that have just changed."""

    @torch.no_grad()
    def follow_student(self) -> None:
        for parameter, shard in self._pairs():
            shard.copy_(part_like(parameter.to(shard.dtype), shard))

    def _pairs(self) -> Iterable[tuple[nn.Parameter, Any]]:
        """The student's parameters and their shards."""
        return zip(self.student.parameters(), self.lm.model.parameters(), strict=True)


def whole(tensor: Tensor, *, keep: bool = True) -> Tensor | None:
    """A tensor of which processes may hold parts; those take part together. None where it is not to be kept."""
    if not isinstance(tensor, DTensor):
        return tensor if keep else None
    full = tensor.full_tensor()
    return full.cpu() if keep else None


def part_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A copy of the part of a whole tensor that this process has of `like`, which has the same shape; all, if it has all."""
    if not isinstance(like, DTensor):
        return tensor.clone()
    # Without a source rank nothing is sent: every process takes its part of the tensor that it has.
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _refuse(lm: ResponseModel) -> None:
    _layers(lm.model)
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ShardingError(f"optim.shard needs a newer torch than {torch.__version__}: update it, or leave optim.shard out")
    kinds = {parameter.dtype for parameter in trained(lm.model)}
    if len(kinds) > 1:
        raise ShardingError(
            f"the student is trained in several precisions ({', '.join(sorted(map(str, kinds)))}), which optim.shard cannot "
            "gather together: set models.dtype = 'float32', or leave optim.shard out"
        )
    if not lm.fused and not lm.chunked:
        raise ShardingError(
            f"the logits of a {type(lm.model).__name__} are computed one rollout at a time, and processes with different "
            "numbers of rollouts would wait for each other: leave optim.shard out"
        )


def _layers(model: Any) -> list[nn.Module]:
    """The decoder layers: what transformers never splits over devices."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names and any(True for _ in module.parameters())]
    if not layers:
        raise ShardingError(
            f"which layers a {type(model).__name__} has is unknown (it names no _no_split_modules): leave optim.shard out"
        )
    return layers[::-1]  # a layer inside another comes first


def _without_weights(model: nn.Module) -> Any:
    """A copy of a model whose parameters have shapes but no memory; tied ones stay tied, buffers are copied."""
    empty = {id(one): nn.Parameter(torch.empty_like(one, device="meta"), one.requires_grad) for one in model.parameters()}
    return copy.deepcopy(model, empty)


def _fill(unit: nn.Module, weights: dict[nn.Parameter, nn.Parameter]) -> None:
    """Give the empty parameters of a module the values of `weights`; trained ones in float32."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in unit.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                continue
            if parameter not in made:
                source = weights[parameter].detach()
                kind = torch.float32 if parameter.requires_grad and source.dtype in HALF else source.dtype
                values = source.to(kind, copy=True, memory_format=torch.contiguous_format)
                made[parameter] = nn.Parameter(values, parameter.requires_grad)
            setattr(module, name, made[parameter])


def _give_own_storage(parameter: nn.Parameter) -> None:
    """Memory that can be given back: not a part of a file or of another tensor's."""
    storage = parameter.untyped_storage()
    if not storage.resizable() or storage.nbytes() != parameter.nbytes:
        parameter.data = parameter.data.clone()
