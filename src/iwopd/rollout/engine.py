"""Engines: who writes the rollouts. One is opened with a student, makes samplers, follows the student's weights, is closed.

Another package adds an engine with a subclass of `Engine` and an entry point; `rollout.engine = "fast"` then selects it, and
`[engine.fast]` holds its settings:

    [project.entry-points."iwopd.engines"]
    fast = "my_package.engine:FastEngine"
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from iwopd.errors import UserError
from iwopd.model_facts import output_rows, pad_id
from iwopd.registry import Registry
from iwopd.section import Section

if TYPE_CHECKING:
    from iwopd.rollout.sampler import Sampler
    from iwopd.rollout.sampling import SamplingSettings


class EngineError(UserError, RuntimeError):
    """An engine that cannot start, is away for too long, or cannot follow the student. Steps that are done stay good."""


@dataclass(frozen=True)
class Student:
    """What an engine writes with. The model is loaded when it is first asked for: a server may have its own."""

    load: Callable[[], Any]
    vocab_size: int
    """Ids of the tokenizer; the model's output matrix may have more rows."""
    rows: int
    pad_id: int = 0
    longest: int | None = None
    """Tokens of the longest prompt and its answer together, where they are known."""
    dtype: str = "float32"
    """Precision in which the model is loaded."""
    computes: str | None = None
    """Precision in which the run computes with it, if that is another one than `dtype` (autocast)."""
    seed: int = 0
    rank: int = 0
    ranks: int = 1
    """Processes that train together, of which this one is number `rank`."""

    @classmethod
    def of(cls, model: Any, tokenizer: Any, **more: Any) -> Self:
        """A student that is loaded already."""
        about = {"dtype": str(model.dtype).removeprefix("torch."), "pad_id": pad_id(tokenizer), **more}
        return cls(lambda: model, vocab_size=len(tokenizer), rows=output_rows(model), **about)

    @cached_property
    def model(self) -> Any:
        return self.load()


class Engine:
    """Base class of all engines. An engine is also a context manager that closes itself."""

    settings_type: ClassVar[type[Section]] = Section
    """Its settings: what `[engine.<name>]` may hold."""
    exact: ClassVar[bool] = False
    """Its log-probs are the trainer's own. If not, training corrects for the difference and watches it."""
    several_ranks: ClassVar[bool] = False
    """It works where several processes train together: each opens one and writes its share. Of one with its weights elsewhere,
    `update_weights` is called by all of them together; rank 0 sends, the others wait."""
    restricts: ClassVar[bool] = False
    """It takes top-p and top-k, and still gives log-probs over the whole vocabulary."""
    watched: ClassVar[bool] = False
    """Answers can be stopped while it writes them: horizons of the kind `drift` need it."""
    weights: ClassVar[Literal["student", "copy", "elsewhere"]] = "copy"
    """The weights it writes with: the student's own, a copy on the same GPUs, or a copy elsewhere. `iwopd plan` asks."""

    def __init__(self, student: Student, settings: Any) -> None:
        """`settings` is a `settings_type`."""
        self.student, self.settings = student, settings

    @classmethod
    def check(cls, settings: Any, *, trained: bool) -> None:
        """Refuse settings that cannot work, with a ValueError, before any model is loaded. `trained`: in training."""

    @classmethod
    def check_here(cls) -> None:
        """Refuse a machine without the packages that it needs, with an `EngineError`, before any model is loaded."""

    @property
    def dtype(self) -> str:
        """Precision of its log-probs."""
        return self.student.dtype

    @property
    def folder(self) -> Path | None:
        """A folder through which weights go, if there is one: whoever opens the engine owns it, and nobody else writes."""
        return None

    def sampler(self, settings: SamplingSettings) -> Sampler:
        """A sampler; all samplers of an engine share it. Each calls `update_weights` before it writes."""
        raise NotImplementedError

    def update_weights(self) -> None:
        """Write with the student's weights of this moment from now on; cheap if they have not changed."""

    def close(self) -> None:
        """Give everything back. The engine must not be used again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class EngineChoice:
    """An engine by name, with its settings."""

    name: str
    settings: Section

    def open(self, student: Student) -> Engine:
        return ENGINES[self.name](student, self.settings)


LOCAL = EngineChoice("local", Section())
"""The student itself, in this process."""


def _adopt(name: str, loaded: Any, origin: str) -> type[Engine]:
    if not (isinstance(loaded, type) and issubclass(loaded, Engine)):
        raise TypeError(f"expected a subclass of iwopd.rollout.engine.Engine, got {loaded!r}")
    return loaded


ENGINES: Registry[type[Engine]] = Registry("rollout engine", "iwopd.engines", _adopt)
ENGINES.declare("local", "iwopd.rollout.local:LocalEngine")
ENGINES.declare("vllm", "iwopd.rollout.vllm:VllmEngine")
ENGINES.declare("server", "iwopd.rollout.server:ServerEngine")
