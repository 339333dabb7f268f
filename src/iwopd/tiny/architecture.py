"""Models of the embedded world: named sizes, the recipe of a pretrained model, and an untrained model of a size.

Qwen3 architecture, so every tool that knows Qwen3 knows these: 4 heads, 2 key/value heads, head size d/4, feed-forward
2d, tied embeddings.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from iwopd.tiny.tokenizer import CHARACTERS, build_tokenizer

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

RECIPE_VERSION = 1
"""Raise it when the same recipe would train another model: cached models of older versions are then ignored."""
WINDOW = 25
"""Steps over which `Stage.until` takes the mean loss."""


@dataclass(frozen=True)
class ModelSize:
    """Width and depth."""

    hidden: int
    layers: int = 3

    def __post_init__(self) -> None:
        if self.hidden % 8 or self.hidden < 8 or self.layers < 1:
            raise ValueError(f"hidden must be a positive multiple of 8 and layers at least 1, got {self}")


STUDENT_SIZES: Mapping[str, ModelSize] = {"small": ModelSize(48), "medium": ModelSize(64), "large": ModelSize(80)}
"""63k, 112k and 175k parameters."""
TEACHER_SIZES: Mapping[str, ModelSize] = {"weak": ModelSize(64), "strong": ModelSize(96)}
"""112k and 252k parameters."""


@dataclass(frozen=True)
class Stage:
    """One stage of supervised training with its own data and learning-rate schedule."""

    steps: int
    operands: int
    right: float
    """Probability that a `unit` respects the order of operations; otherwise it is worked out from left to right."""
    unit: Literal["solution", "line"] = "solution"
    """Whether the draw is made once per solution or once per line."""
    sure: int = 0
    """Lines with at most this many operands always respect the order (unit "line"): short expressions are easy."""
    learning_rate: float = 3e-3
    schedule: Literal["trapezoid", "cosine"] = "trapezoid"
    """`trapezoid`: warm-up, constant to 60 %, then linear to 5 %; `cosine`: from the full rate to 0."""
    shorter: tuple[tuple[int, int], ...] = ()
    """(steps, operands) pairs that the stage begins with: long expressions are learnt faster after short ones."""
    batch: int = 32
    warmup: int = 50
    stop: int | None = None
    """Ends after so many of its steps, in the middle of its schedule."""
    until: float | None = None
    """Ends once the mean loss of `WINDOW` steps on expressions of full length is below this, in the middle of its schedule. So
    students of all lineages are equally far, which a number of steps does not give."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1 or not 0 <= self.right <= 1:
            raise ValueError(f"steps and batch must be at least 1 and right must lie in [0, 1], got {self}")
        if sum(steps for steps, _ in self.shorter) > self.steps:
            raise ValueError(f"the shorter expressions take more than the stage's {self.steps} steps: {self.shorter}")
        if self.until is not None and self.until <= 0:
            raise ValueError(f"until is a loss and must be above 0, got {self.until}")
        if self.stop is not None and not 1 <= self.stop <= self.steps:
            raise ValueError(f"stop must lie between 1 and the stage's {self.steps} steps, got {self.stop}")

    @property
    def taken(self) -> int:
        """Steps that are taken."""
        return self.steps if self.stop is None else self.stop

    def is_far_enough(self, losses: Sequence[float]) -> bool:
        """Whether it ends now, by the losses of all its steps so far."""
        full = len(losses) - sum(steps for steps, _ in self.shorter)
        return self.until is not None and full >= WINDOW and math.fsum(losses[-WINDOW:]) / WINDOW < self.until

    def operands_at(self, step: int) -> int:
        """Number of operands at this step (counted from 0)."""
        for steps, operands in self.shorter:
            if step < steps:
                return operands
            step -= steps
        return self.operands

    def learning_rate_at(self, step: int) -> float:
        """Learning rate at this step (counted from 0)."""
        if self.schedule == "cosine":
            return self.learning_rate * 0.5 * (1 + math.cos(math.pi * step / self.steps))
        warm = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        done = step / self.steps
        return self.learning_rate * warm * (1.0 if done < 0.6 else 1.0 - 0.95 * (done - 0.6) / 0.4)


@dataclass(frozen=True)
class ModelRecipe:
    """Everything that determines the weights of a pretrained model."""

    name: str
    """Part of the seed and of the cache folder's name."""
    size: ModelSize
    stages: tuple[Stage, ...]
    lineage: int = 0
    """Seed of initialisation and data order."""
    tokenizer: str = CHARACTERS
    """One of `tokenizer.TOKENIZERS`. The texts are the same under each of them."""

    @property
    def steps(self) -> int:
        return sum(stage.taken for stage in self.stages)

    @property
    def seed(self) -> str:
        return f"iwopd/tiny/{self.name}/{self.lineage}"

    @property
    def key(self) -> str:
        """Name of the model's cache folder: readable, and different for every recipe and recipe version."""
        text = json.dumps({"version": RECIPE_VERSION, **self.to_dict()}, sort_keys=True)
        name = self.name if self.tokenizer == CHARACTERS else f"{self.name}-{self.tokenizer}"
        return f"{name}-{self.lineage}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def to_dict(self) -> dict[str, Any]:
        """Without settings that are nearly everybody's, so that models cached before there were others keep their keys."""
        found = {name: value for name, value in asdict(self).items() if (name, value) != ("tokenizer", CHARACTERS)}
        found["stages"] = [{name: value for name, value in stage.items() if value is not None} for stage in found["stages"]]
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelRecipe:
        stages = tuple(Stage(**{**stage, "shorter": tuple(map(tuple, stage["shorter"]))}) for stage in values["stages"])
        return cls(values["name"], ModelSize(**values["size"]), stages, values["lineage"], values.get("tokenizer", CHARACTERS))


def new_model(size: ModelSize, seed: str, tokenizer: str = CHARACTERS) -> Qwen3ForCausalLM:
    """An untrained model in float32, for the ids of a tokenizer by name.

    The same seed gives the same weights; the global generator is not touched.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    ids = build_tokenizer(tokenizer)
    config = Qwen3Config(
        vocab_size=len(ids),
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=size.hidden // 4,
        max_position_embeddings=512,
        initializer_range=0.8 / math.sqrt(size.hidden),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ids.eos_token_id,
        pad_token_id=ids.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7]))
        return Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
