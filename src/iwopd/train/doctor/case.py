"""What can be known of a recipe without loading weights: tokenizers, configs, prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from iwopd import tiny
from iwopd.config import Config
from iwopd.config.engines import AUTO, STUDENT
from iwopd.data.sets import LoadedPrompts
from iwopd.errors import ConfigError, UserError
from iwopd.models import ModelError, ModelSource
from iwopd.tiny.world import max_response_tokens
from iwopd.train.loading import reference_source, source_of, world_recipe
from iwopd.train.prompts import order_of, prompt_order, training_sets
from iwopd.train.tokenizers import TEACHER, named_tokenizer, read_files
from iwopd.types import Prompt
from iwopd.vocabulary import compare_vocabularies

WORLD_PROMPTS = 256
"""Prompts of an embedded world that are looked at."""


@dataclass(frozen=True, eq=False)
class Member:
    """A model of the run, as its files describe it."""

    name: str
    """student, teacher or reference."""
    source: ModelSource | None
    """None: an embedded world brings it."""
    tokenizer: Any = None
    config: Any = None
    generation: Any = None
    problem: str = ""
    """Why something of it could not be read."""
    elsewhere: bool = False
    """Behind a server: its weights need not be here, and its tokenizer may not be."""

    @property
    def unreachable(self) -> bool:
        """On a hub that did not answer, or behind a server: nothing can be said about it here."""
        return bool(self.problem) and self.source is not None and (self.elsewhere or self.source.is_hub_id)


@dataclass(frozen=True, eq=False)
class Case:
    """A recipe under examination."""

    config: Config
    members: dict[str, Member]
    max_response: int | None
    """Longest response; None if nobody says."""
    folder: Path
    """The run directory, which need not exist yet."""
    prompts: Sequence[Prompt] = ()
    data_problem: str = ""
    sets: Sequence[LoadedPrompts] = ()
    """What was read, and how much of it was left out; known also where a step cannot be made of it."""

    @property
    def student(self) -> Member:
        return self.members["student"]

    @property
    def teacher(self) -> Member:
        """Behind a server it may be nothing but a name; one that is the student itself is not even that."""
        return self.members.get("teacher", Member("teacher", None, elsewhere=True))

    @cached_property
    def foreign(self) -> bool:
        """Whether the teacher's ids mean something else than the student's: answers are then aligned by their text."""
        return self.config.teacher.tokenizer != STUDENT and not self.same_ids

    @cached_property
    def same_ids(self) -> bool:
        """Whether the student's ids mean the same to the teacher, as far as its tokenizer is known."""
        ours = self.student.tokenizer if "student" in self.members else None
        return ours is None or self.teacher.tokenizer is None or compare_vocabularies(ours, self.teacher.tokenizer).same

    @property
    def longest_prompt(self) -> int:
        return max((len(prompt.token_ids) for prompt in self.prompts), default=self.config.data.max_prompt_tokens)


def open_case(config: Config, folder: Path, say: Callable[[str], None] = lambda _: None) -> Case:
    """Read what there is. Never raises for what a check can say better. `say` hears what begins, if it may take a while."""
    recipe = world_recipe(config)
    world = None if recipe is None else tiny.World(recipe, Path("teacher"), Path("student"))  # its models need not be there
    reference = reference_source(config, world)
    if recipe is not None:
        made = {"student": recipe.student, **({"reference": recipe.student} if reference else {})}
        if not config.teacher.is_student:
            made["teacher"] = recipe.teacher
        members = {name: Member(name, None, tiny.build_tokenizer(one.tokenizer)) for name, one in made.items()}
    else:
        sources = {"student": source_of(config, "student"), "teacher": source_of(config, "teacher"), "reference": reference}
        trust, served = config.models.trust_remote_code, {"teacher"} if config.teacher.urls else set()
        members = {}
        for name, source in sources.items():
            if source is not None:
                say(f"reading tokenizer and config of the {name} {source}")
                members[name] = read_member(name, source, trust, name in served)
        if config.teacher.tokenizer not in (AUTO, STUDENT):
            members["teacher"] = _with_tokenizer(members.get("teacher", Member("teacher", None, elsewhere=True)), config)
    limit = config.rollout.max_tokens or (max_response_tokens(recipe.operands) if recipe is not None else None)
    sets: Sequence[LoadedPrompts] = ()
    prompts: Sequence[Prompt] = ()
    problem = ""
    tokenizer = members["student"].tokenizer
    try:
        if world is not None:
            prompts = prompt_order(_fewer(config), world, tokenizer, lambda _: None).prompts
        elif tokenizer is not None:
            say("reading and rendering the prompts")
            sets = training_sets(config, tokenizer)
            prompts = order_of(config, sets).prompts
    except UserError as error:
        problem = str(error)
    return Case(config, members, limit, folder, prompts, problem, sets)


def _fewer(config: Config) -> Config:
    """A world's prompts are all of one kind, and making thousands of them takes longer than all checks together."""
    if config.models.world is None:
        return config
    size = min(config.data.train_size, max(WORLD_PROMPTS, config.rollout.prompts_per_step))
    return config.model_copy(update={"data": config.data.model_copy(update={"train_size": size})})


def _with_tokenizer(teacher: Member, config: Config) -> Member:
    """The teacher with the tokenizer that the settings name."""
    try:
        named = named_tokenizer(config, TEACHER, teacher.tokenizer)
    except ModelError as error:
        return replace(teacher, problem=f"teacher.tokenizer: {error}")
    except ConfigError as error:
        return replace(teacher, problem=str(error))
    return replace(teacher, tokenizer=named, problem="" if teacher.elsewhere else teacher.problem)


def read_member(name: str, source: ModelSource, trust_remote_code: bool, elsewhere: bool) -> Member:
    return Member(name, source, *read_files(source, trust_remote_code), elsewhere=elsewhere)
