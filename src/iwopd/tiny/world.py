"""Named worlds: a task, a teacher that can do it and a student that cannot yet, trained from scratch in minutes.

- `clean` (6 operands): the teacher was trained on right solutions only. After a student's wrong line it can only
  copy: the sharpest contrast between early and late tokens.
- `drift` (8 operands): one in ten of the teacher's training solutions works from left to right, so it can continue drifted
  prefixes, and does: closer to what large teachers do.
- `long` (14 operands, 264 tokens an answer): teacher and student learn from right solutions only, by one recipe; the student is
  smaller and stopped early, at a certain loss. Its mistakes are its own: nobody decided where they fall, or what the teacher
  makes of them.

A lineage is a seed: another initialisation and data order, everything else the same.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from iwopd.registry import suggestion
from iwopd.tiny import task
from iwopd.tiny.architecture import STUDENT_SIZES, TEACHER_SIZES, ModelRecipe, Stage
from iwopd.tiny.cache import cached_models, model_folder, weights_digest
from iwopd.tiny.pretrain import PretrainingListener
from iwopd.tiny.tokenizer import CHARACTERS, TOKENIZERS, build_tokenizer
from iwopd.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_WORLD = "clean"


@dataclass(frozen=True)
class WorldRecipe:
    """Everything that determines a world."""

    name: str
    operands: int
    """Operands of every problem, in training and evaluation."""
    teacher: ModelRecipe
    student: ModelRecipe


@dataclass(frozen=True)
class World:
    """A world and the folders of its models, which `AutoModelForCausalLM.from_pretrained` loads, tokenizer included."""

    recipe: WorldRecipe
    teacher: Path
    student: Path

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The student's, and the teacher's unless its recipe names another."""
        return build_tokenizer(self.recipe.student.tokenizer)

    @property
    def max_response_tokens(self) -> int:
        return max_response_tokens(self.recipe.operands)

    @property
    def max_prompt_tokens(self) -> int:
        return 2 * self.recipe.operands

    def prompts(self, n: int, *, seed: int = 0) -> list[Prompt]:
        """`n` different training prompts, none of them an evaluation prompt; a shorter list is a prefix of a longer one."""
        return _prompts(self.recipe.operands, "train", n, f"iwopd/tiny/train/{seed}", self.tokenizer)

    def eval_prompts(self, n: int) -> list[Prompt]:
        """`n` different evaluation prompts, always the same: the first of one fixed list."""
        return eval_prompts(self.recipe.operands, n, self.tokenizer)

    @property
    def weights(self) -> dict[str, str]:
        """What names the weights of both models, which one recipe and lineage do not: processors round differently."""
        return {"student": weights_digest(self.student), "teacher": weights_digest(self.teacher)}

    def check(self, prompt: Prompt, response_text: str) -> bool:
        """Whether the answer to one of this world's prompts is right."""
        return task.check(prompt.text, response_text)


def right_solution(prompt: Prompt) -> str:
    """The solution of one of a world's prompts by the order of operations: what its checker calls right."""
    return task.right_solution(str(prompt.metadata["expression"]))


def max_response_tokens(operands: int) -> int:
    """Enough for every solution and a few stray tokens; a longer answer is a broken one."""
    return task.response_tokens(operands) + 16


def eval_prompts(operands: int, n: int, tokenizer: Any) -> list[Prompt]:
    """The first `n` of the fixed list of evaluation problems with this many operands."""
    return _prompts(operands, "eval", n, "iwopd/tiny/eval", tokenizer)


def open_world(
    world: str | WorldRecipe = DEFAULT_WORLD, *, refresh: bool = False, progress: PretrainingListener | None = None
) -> World:
    """A world by name or recipe, its models trained or loaded from the cache (`refresh` trains them again).

    `progress` is called with ("teacher" or "student", step, steps, loss) while they are trained.
    """
    recipe = world_recipe(world) if isinstance(world, str) else world
    folders = cached_models({"teacher": recipe.teacher, "student": recipe.student}, refresh=refresh, progress=progress)
    return World(recipe, folders["teacher"], folders["student"])


def planned_world(recipe: WorldRecipe) -> World:
    """The same without training: prompts, checker, and where the models are or will be."""
    return World(recipe, model_folder(recipe.teacher), model_folder(recipe.student))


class _Training(NamedTuple):
    """How a world's models are trained, by the teacher's name and for every student."""

    operands: int
    teacher: Mapping[str, Stage]
    student: tuple[Stage, ...]


_LONG = Stage(1300, 14, right=1.0, shorter=((150, 4), (200, 6), (200, 8), (200, 11)), batch=16)
WORLDS: Mapping[str, _Training] = {
    # The student first learns either order on whole solutions, then mixes them line by line: mixing from the start is
    # learnt badly (wrong operands). It is sure of lines with three operands, so its mistakes come early.
    "clean": _Training(
        6,
        {"strong": Stage(900, 6, right=1.0), "weak": Stage(600, 6, right=1.0)},
        (Stage(800, 6, right=0.2), Stage(300, 6, right=0.2, unit="line", sure=3, learning_rate=1.5e-3, schedule="cosine")),
    ),
    # Longer than in `clean`: after 800 steps the student still loses operands, and learns nothing from this teacher.
    "drift": _Training(
        8,
        {name: Stage(n, 8, right=0.9, shorter=((150, 4), (250, 6))) for name, n in (("strong", 900), ("weak", 700))},
        (
            Stage(1800, 8, right=0.5, shorter=((300, 4), (600, 6))),
            Stage(500, 8, right=0.25, unit="line", learning_rate=1.5e-3, schedule="cosine"),
        ),
    ),
    "long": _Training(14, {"strong": _LONG, "weak": replace(_LONG, stop=1050)}, (replace(_LONG, until=0.012),)),
}


def world_recipe(
    name: str = DEFAULT_WORLD,
    *,
    teacher: str = "strong",
    student: str = "medium",
    lineage: int = 0,
    teacher_tokenizer: str = CHARACTERS,
) -> WorldRecipe:
    """The recipe of a named world, with a named teacher (`TEACHER_SIZES`) and student size (`STUDENT_SIZES`).

    A teacher with another tokenizer (`TOKENIZERS`) is as large and learns from the same texts in the same order.
    """
    kinds = {
        "world": (name, WORLDS),
        "teacher": (teacher, TEACHER_SIZES),
        "student": (student, STUDENT_SIZES),
        "tokenizer": (teacher_tokenizer, TOKENIZERS),
    }
    for kind, (chosen, known) in kinds.items():
        if chosen not in known:
            raise ValueError(f"unknown {kind} {chosen!r}{suggestion(chosen, list(known))}")
    world = WORLDS[name]
    stages = (world.teacher[teacher],)
    taught = ModelRecipe(f"{name}-teacher-{teacher}", TEACHER_SIZES[teacher], stages, lineage, teacher_tokenizer)
    learnt = ModelRecipe(f"{name}-student-{student}", STUDENT_SIZES[student], world.student, lineage)
    return WorldRecipe(name, world.operands, taught, learnt)


def _prompts(operands: int, split: task.Split, n: int, seed: str, tokenizer: Any) -> list[Prompt]:
    expressions = task.distinct_problems(operands, split, random.Random(seed), n)
    return [_prompt(tokenizer, expression, split) for expression in expressions]


def _prompt(tokenizer: Any, expression: str, split: task.Split) -> Prompt:
    messages = [{"role": "user", "content": expression}]
    text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    return Prompt(
        id=f"{split}/{expression}",
        token_ids=tuple(tokenizer.encode(text, add_special_tokens=False)),
        text=text,
        answer=task.answer(expression),
        metadata={"expression": expression, "split": split},
    )
