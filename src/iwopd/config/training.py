"""Settings of the method, the optimizer, and what a run keeps."""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator

from iwopd import algo
from iwopd.config.section import Beta, Place, Repeat, Section


class Method(Section):
    advantage: Literal["opd", "exopd"] = Field("opd", description="opd, or exopd with its extrapolated reward")
    weights: str = Field("uniform", description="weight rule: see `iwopd methods`")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of the weight rule, e.g. {gamma = 0.5}")
    scale: float = Field(1.25, gt=0, description="ExOPD's reward scale lambda")
    weighting: Literal["reward-scale", "advantage"] = Field("reward-scale", description="where IW-ExOPD applies the weights")
    clip: float = Field(0.2, gt=0, description="PPO clip, both sides")
    dual_clip: float = Field(3.0, gt=1, description="cap of the ratio for negative advantages; inf: off")
    correction_threshold: float = Field(5.0, gt=0, description="truncation of the rollout correction (other engines only)")
    entropy_coef: float = Field(0.0, ge=0, description="entropy bonus")
    kl_coef: float = Field(0.0, ge=0, description="auxiliary KL to the reference, low-variance form")

    @model_validator(mode="after")
    def _rule_exists(self) -> Self:
        nothing = torch.zeros(1, 2)
        try:  # on two tokens: wrong names and values are found here, not after the first rollouts
            algo.token_weights(self.weights, nothing, nothing == 0, progress=0.0, **self.params)
        except TypeError as error:
            raise ValueError(f"params {self.params}: {error}") from None
        return self

    @property
    def signal(self) -> dict[str, Any]:
        """The method's arguments of `algo.signal.training_signal`."""
        return {
            "advantage": self.advantage,
            "weights": self.weights,
            "weight_params": self.params,
            "scale": self.scale,
            "weighting": self.weighting,
        }

    @property
    def needs_reference(self) -> bool:
        return self.advantage == "exopd" or self.kl_coef > 0


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


class Eval(Section):
    every: int = Field(10, ge=1, description="evaluate every so many steps (and before the first and after the last)")
    tasks: list[str] = Field([], description="tasks of `iwopd eval`; empty: the embedded world's own, if there is a world")
    data: dict[str, str] = Field(default_factory=dict, description="data file of a task, e.g. {aime25 = 'problems.jsonl'}")
    prompts: int = Field(256, ge=0, description="problems of each task, the first ones; 0: no evaluation")
    samples: int = Field(1, ge=1, description="samples per evaluation prompt")
    temperature: float = Field(1.0, ge=0, description="0: greedy")
    max_tokens: int | None = Field(None, ge=1, description="longest answer; empty: as in training")
    kept_rollouts: Place[int] = Field(8, ge=0, description="rollouts kept in full per evaluation, for the report")


class CheckpointSettings(Section):
    every: int = Field(10, ge=1, description="save every so many steps (and after the last)")
    keep: int = Field(2, ge=1, description="newest checkpoints that stay")
    best: str | None = Field(None, description="task whose accuracy names the best checkpoint, which stays, too; empty: none")


class Tracking(Section):
    console: Literal["auto", "live", "plain", "off"] = Field("auto", description="live: progress display; plain: a line a step")
    trackers: list[Literal["tensorboard", "trackio", "wandb"]] = Field(
        [], description="further trackers; JSONL is always written"
    )
    project: str = Field("iwopd", description="project name for trackers that have one")
