"""Settings of `iwopd train --engine verl`: what only a cluster has."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from iwopd.section import Section


class Cluster(Section):
    """GPUs, who gets how many, and how verl runs on them. Rollouts also read the section engine.vllm."""

    nodes: int = Field(1, ge=1, description="machines (--nodes)")
    gpus_per_node: int = Field(8, ge=1, description="GPUs of each machine (--gpus-per-node)")
    teacher_gpus: int | None = Field(None, ge=1, description="GPUs of all teachers, the rest is the student's; empty: half")
    teacher_tensor_parallel: int = Field(1, ge=1, description="GPUs of one copy of a teacher")
    teacher_memory_share: float = Field(0.8, gt=0, le=1, description="share of a teacher's GPU memory that its engine may take")
    backend: Literal["vllm", "sglang"] = Field("vllm", description="engine of student's rollouts and teacher's scores")
    strategy: Literal["fsdp2", "fsdp"] = Field("fsdp2", description="how the student's weights are spread over its GPUs")
    sequence_parallel: int = Field(1, ge=1, description="GPUs that share one long sequence in the update (Ulysses)")
    offload: bool = Field(False, description="keep the student's weights and optimizer in main memory between their uses")
    save_hf: bool = Field(True, description="verl saves Hugging Face weights, too; false: merged from its shards afterwards")
    checkpoints: str | None = Field(
        None, description="folder of verl's own checkpoints, seen by all machines; empty: verl/checkpoints in the run directory"
    )
    patience: float = Field(7200.0, gt=0, description="seconds without a finished step (or the start) before the job is ended")
    overrides: list[str] = Field([], description="further settings of verl, e.g. ['trainer.balance_batch=false']; come last")
