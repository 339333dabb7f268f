"""Settings of the task reward beside the teacher."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from iwopd.section import Place, Section


class Reward(Section):
    """A checker judges rollouts, and what it says is added to the distillation advantage (docs/reward.md)."""

    checker: str | None = Field(None, description="who judges: math, exact, code, tiny or a plug-in's; empty: no reward")
    coefficient: float = Field(
        1.0, ge=0, allow_inf_nan=False, description="factor of the reward's advantage; 0: rewards are logged and nothing added"
    )
    normalize: Literal["deviation", "mean", "none"] = Field(
        "deviation", description="over a prompt's rollouts: (r - mean) / deviation (GRPO), r - mean (Dr. GRPO), or r itself"
    )
    timeout: Place[float] = Field(120.0, gt=0, description="seconds after which the check of a rollout counts as hanging")
    workers: Place[int | None] = Field(None, ge=1, description="rollouts checked at once; empty: one per processor")

    @model_validator(mode="after")
    def _somebody_judges(self) -> Self:
        given = sorted(self.model_fields_set - {"checker"})
        defaults = all(getattr(self, name) == type(self).model_fields[name].default for name in given)
        if self.checker is None and given and not (defaults and {"coefficient", "normalize", "timeout"} <= set(given)):
            # A tree of settings that was written out holds all defaults; a user who sets one of them wants a reward.
            raise ValueError(
                f"reward.{given[0]} is {getattr(self, given[0])!r}, but nobody judges: set reward.checker ('math', 'exact', "
                "'code', 'tiny' or a plug-in's), or leave the section out"
            )
        return self

    @property
    def added(self) -> bool:
        """Whether anything is added to the advantage."""
        return self.checker is not None and self.coefficient > 0
