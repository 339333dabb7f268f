"""The engine `hf` for verl: a server (`server.py`), the replica that starts it, and the adapter that sends it weights."""

from __future__ import annotations

import os
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.utils.tokenizer.continuous_token_wiring import _MODEL_TYPE_TO_FAMILY, ContinuousTokenModelFamily
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from verl_testing import BREAK, OWN_TOKENS

NAME = "hf"


def install() -> None:
    """Register replica and adapter under the name `hf`; allow the embedded worlds' tokenizers."""
    RolloutReplicaRegistry.register(NAME, lambda: Replica)
    _ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.Adapter"
    if os.environ.get(OWN_TOKENS):  # verl expects Qwen's own tokens for every Qwen architecture, and our check refuses others
        _MODEL_TYPE_TO_FAMILY["qwen3"] = ContinuousTokenModelFamily.DEFAULT


class Replica(RolloutReplica):  # type: ignore[misc]  # verl has no types
    """One server, for the student or a teacher, on the node of its first worker."""

    async def launch_servers(self) -> None:
        """Start the server and wait until its model is loaded."""
        from verl_testing.server import StudentServer, TeacherServer  # late: its process imports it first, and verl from there

        node = await self.workers[0].__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        role = "teacher_" if self.is_teacher_model else ""
        server = (
            ray.remote(TeacherServer if self.is_teacher_model else StudentServer)
            .options(
                name=f"{NAME}_server_{role}{self.replica_rank}{self.name_suffix}",
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
                max_concurrency=self.max_concurrency,
            )
            .remote(self.model_config.path, self.config.response_length, self.config.seed, self.config.dtype)
        )
        self._server_address = await server.address.remote()
        self._server_handle = server
        self.servers = [server]


class Adapter(BaseRollout):  # type: ignore[misc]
    """The trainer's side of weight sync. Every rank gathers the weights, the first rank of a replica sends them."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        size = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        rank = int(os.environ["RANK"])
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0

    async def resume(self, tags: list[str]) -> None:
        """The server never sleeps."""

    async def release(self) -> None:
        """The server never sleeps."""

    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Send all weights at once, or an adapter alone: tiny models only."""
        if wire_format != "named_tensors":
            raise NotImplementedError(f"the engine {NAME!r} for tests takes whole tensors, not {wire_format!r}")
        gathered = {name: tensor.detach().cpu() async for name, tensor in ensure_async_iterator(weights)}
        if self.is_leader_rank:
            server = ray.get_actor(f"{NAME}_server_{self.replica_rank}")
            broken = os.environ.get(BREAK) if global_steps else None
            if broken == "lost":
                return
            if broken == "stale":
                await server.set_global_steps.remote(global_steps)
                return
            if broken == "tensor":
                name = max(name for name, values in gathered.items() if values.ndim > 1)
                gathered[name] = torch.zeros_like(gathered[name])
            await server.update_weights.remote(gathered, global_steps, peft_config)
