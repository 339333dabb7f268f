"""verl's extension of vLLM's workers, in the processes that hold a model: two patches for CPUs, and a look at the weights."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl_vllm_testing import SYNCED

# By name: type checkers would find the folder tests/vllm.
custom_ops: Any = importlib.import_module("vllm._custom_ops")
Attention: Any = importlib.import_module("vllm.model_executor.layers.attention.attention").Attention
SIZES: list[int] = importlib.import_module("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend.get_supported_head_sizes()

# verl writes new weights into the layers, as on a GPU. vLLM's CPU build would pack each layer's weight for oneDNN when it is
# loaded and drop it, so that there is nothing to write into; without oneDNN it multiplies by the weight itself.
custom_ops._supports_onednn = False


def _widen_heads() -> None:
    """The worlds' models have heads of 16 and 24, for which vLLM's CPU attention has no kernel: zeros fill the next larger one.

    Scores and outputs are sums over a head's entries, and the scale is given by the model, so nothing else changes.
    """
    start, forward = Attention.__init__, Attention.forward

    def wide_start(self: Any, num_heads: int, head_size: int, *args: Any, **kwargs: Any) -> None:
        start(self, num_heads, min(size for size in SIZES if size >= head_size), *args, **kwargs)
        self.own_head_size = head_size

    def wide_forward(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any) -> torch.Tensor:
        own, room = self.own_head_size, self.head_size - self.own_head_size
        heads = (entries.unflatten(-1, (-1, own)) for entries in (query, key, value))
        wide = (torch.nn.functional.pad(entries, (0, room)).flatten(1) for entries in heads)
        output: torch.Tensor = forward(self, *wide, *args)
        narrow: torch.Tensor = output.unflatten(-1, (-1, self.head_size))[..., :own]
        return narrow.flatten(1)

    Attention.__init__, Attention.forward = wide_start, wide_forward


_widen_heads()


class WorkerExtension(vLLMColocateWorkerExtension):  # type: ignore[misc]  # verl has no types
    """verl's own; after each sync it also leaves the model's weights in the folder SYNCED, if there is one."""

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        super().update_weights_from_ipc(*args, **kwargs)
        if not (folder := os.environ.get(SYNCED)):
            return
        self.syncs = getattr(self, "syncs", 0) + 1
        weights = {name: values.detach().clone() for name, values in self.model_runner.model.named_parameters()}
        name = f"replica-{os.environ['VERL_REPLICA_RANK']}-rank-{self.local_rank}-sync-{self.syncs}.safetensors"
        save_file(weights, Path(folder) / name)
