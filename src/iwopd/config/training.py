"""Settings of the optimizer, the evaluation, and what a run keeps."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from iwopd.config.templates import TemplateKwargs
from iwopd.registry import suggestion
from iwopd.section import Beta, Place, Repeat, Section
from iwopd.trackers import TRACKERS


class Optim(Section):
    lr: float = Field(1e-5, gt=0, description="learning rate (constant)")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="AdamW's betas")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(0.01, ge=0, description="AdamW's weight decay")
    grad_clip: float = Field(1.0, gt=0, description="largest gradient norm")
    ppo_epochs: int = Field(1, ge=1, description="passes over the rollouts of a step")
    mini_batches: int = Field(1, ge=1, description="optimizer updates per pass")
    token_budget: Repeat[int] = Field(8192, ge=1, description="padded tokens of one micro-batch")
    gradient_checkpointing: bool = Field(False, description="trade time for memory in the update")
    shard: Place[bool] = Field(False, description="spread weights, gradients and moments over the processes (FSDP)")


class Eval(Section):
    every: int = Field(10, ge=1, description="evaluate every so many steps (and before the first and after the last)")
    tasks: list[str] = Field([], description="tasks of `iwopd eval`; empty: the embedded world's own, if there is a world")
    data: dict[str, str] = Field(default_factory=dict, description="data file of a task, e.g. {aime25 = 'problems.jsonl'}")
    prompts: int = Field(256, ge=0, description="problems of each task, the first ones; 0: no evaluation")
    samples: int = Field(1, ge=1, description="samples per evaluation prompt")
    chat_template_kwargs: TemplateKwargs = Field(
        default_factory=dict, description="what the chat template is given in evaluations; the rest as in data"
    )
    temperature: float = Field(1.0, ge=0, description="0: greedy")
    max_tokens: int | None = Field(None, ge=1, description="longest answer; empty: as in training")
    kept_rollouts: Place[int] = Field(8, ge=0, description="rollouts kept in full per evaluation, for the report")


class CheckpointSettings(Section):
    every: int = Field(10, ge=1, description="save every so many steps (and after the last)")
    keep: int = Field(2, ge=1, description="newest checkpoints that stay")
    best: str | None = Field(None, description="task whose accuracy names the best checkpoint, which stays, too; empty: none")


class Tracking(Section):
    console: Literal["auto", "live", "plain", "off"] = Field("auto", description="live: a display; plain: one line per step")
    trackers: list[str] = Field([], description="tensorboard, trackio, wandb or a plug-in's; JSONL is always written")
    project: str = Field("iwopd", description="project name for trackers that have one")

    @field_validator("trackers")
    @classmethod
    def _trackers_exist(cls, names: list[str]) -> list[str]:
        unknown = next((name for name in names if name not in TRACKERS), None)
        if unknown is not None:
            raise ValueError(f"unknown tracker {unknown!r}{suggestion(unknown, list(TRACKERS))}")
        return names
