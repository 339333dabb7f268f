"""The student as its own teacher or reference: which of its weights score."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from iwopd.section import Section

TeacherWeights = Literal["model", "base", "live", "ema"]
"""`model`: a model of its own. The others are the student's: `base`, the frozen weights under its adapter; `live`, its present
ones; `ema`, their moving average."""
ReferenceWeights = Literal["model", "base", "ema"]
"""The same. A reference that is the present student would say nothing."""
WORDS = {
    "base": "the student without its adapter",
    "live": "the student's present weights",
    "ema": "the moving average of the student's weights",
}


class Reference(Section):
    source: ReferenceWeights = Field(
        "model",
        description="model (models.reference, or the student's initial weights), base (under its adapter), ema (its average)",
    )


class Ema(Section):
    """The exponential moving average of the student, where `teacher.source` or `reference.source` is 'ema'."""

    decay: float = Field(
        0.99, ge=0, le=1, description="of an optimizer update: average = decay * average + (1 - decay) * weights"
    )
    device: str | None = Field(None, description="of the average, which also scores there: cpu, cuda:1; empty: the student's")

    @field_validator("device")
    @classmethod
    def _is_one(cls, device: str | None) -> str | None:
        if device is not None:
            import torch  # late: mistakes are answered without it

            try:
                torch.device(device)
            except RuntimeError:
                raise ValueError("is no device: write cpu, cuda or cuda:1, or leave it out") from None
        return device
