"""The `[rollout.mix]` section: answers that somebody else wrote (docs/mix.md)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from iwopd.section import Section


class MixSettings(Section):
    """A share of a step's prompts is answered by the data set or the teacher, and trained on with an objective of its own."""

    share: float = Field(0.0, ge=0, le=1, description="of a step's prompts that others answer, in [0, 1]; 0: none")
    steps: int | None = Field(None, ge=1, description="only in the first so many steps (share 1: a cold start); empty: in all")
    afterwards: float = Field(0.0, ge=0, le=1, description="the share after those steps")
    source: Literal["data", "teacher"] = Field("data", description="who answers: the data set (or world), or the local teacher")
    field: str | None = Field(
        None, min_length=1, description="of 'data': field of the data set with whole answers; empty: the reference answer"
    )
    temperature: float | None = Field(
        None, ge=0, description="of 'teacher': at which it writes; 0: greedy; empty: rollout.temperature"
    )
    objective: Literal["likelihood", "forward-kl"] = Field(
        "likelihood", description="what such answers are trained on: cross-entropy, or KL(teacher || student) at every token"
    )
    coefficient: float = Field(1.0, gt=0, allow_inf_nan=False, description="factor of that objective")

    @property
    def active(self) -> bool:
        """Whether others answer anything in some step."""
        return self.share > 0 or (self.steps is not None and self.afterwards > 0)

    def share_at(self, step: int) -> float:
        """Of the prompts of a step, counted from 1."""
        return self.share if self.steps is None or step <= self.steps else self.afterwards

    @model_validator(mode="after")
    def _settings_belong_together(self) -> Self:
        if self.afterwards and self.steps is None:
            raise ValueError(
                f"afterwards is {self.afterwards:g}, but steps, after which it holds, is empty: set steps, or leave it out"
            )
        if self.active and self.source == "teacher" and self.field is not None:
            raise ValueError(f"field is {self.field!r}, but the teacher writes: set source = 'data', or leave field out")
        if self.active and self.source == "data" and self.temperature is not None:
            raise ValueError(
                f"temperature is {self.temperature:g}, but nothing is drawn: set source = 'teacher', or leave temperature out"
            )
        return self
