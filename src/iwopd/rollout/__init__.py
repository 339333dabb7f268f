"""Students that talk: from `Prompt` to `Rollout`."""

from iwopd.rollout.lean import lean_obstacle
from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampling import SamplingSettings

__all__ = ["LocalSampler", "SamplingSettings", "lean_obstacle"]
