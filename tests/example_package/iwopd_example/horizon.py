"""A horizon: a share of the longest answer."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from iwopd.rollout.horizons import Horizon


class Part(Horizon):
    """Answers stop after a share of the longest one."""

    formula: ClassVar[str] = "the first share * max_tokens tokens"
    source: ClassVar[str] = "the example package"

    share: float = Field(0.5, gt=0, le=1, description="share of rollout.max_tokens")

    def limit(self, max_tokens: int, progress: float) -> int:
        return max(1, int(self.share * max_tokens))
