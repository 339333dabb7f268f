"""Students that talk: from `Prompt` to `Rollout`."""

from iwopd.lean import lean_obstacle
from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampler import Sampler
from iwopd.rollout.sampling import SamplingSettings

__all__ = ["LocalSampler", "Sampler", "SamplingSettings", "lean_obstacle"]
