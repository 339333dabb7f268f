"""What must hold between settings where the student is its own teacher or reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from iwopd.config.engines import AUTO, STUDENT, RolloutSettings, Teacher
from iwopd.config.inputs import Data, Lora, Models
from iwopd.config.method import Method
from iwopd.config.own_teacher import WORDS, Ema, Reference
from iwopd.config.reward import Reward
from iwopd.config.training import Optim
from iwopd.data.chat import THINKING_OFF


class Settings(Protocol):
    """The parts of the tree that are looked at."""

    @property
    def models(self) -> Models: ...
    @property
    def lora(self) -> Lora: ...
    @property
    def data(self) -> Data: ...
    @property
    def method(self) -> Method: ...
    @property
    def reward(self) -> Reward: ...
    @property
    def rollout(self) -> RolloutSettings: ...
    @property
    def optim(self) -> Optim: ...
    @property
    def teacher(self) -> Teacher: ...
    @property
    def reference(self) -> Reference: ...
    @property
    def ema(self) -> Ema: ...
    @property
    def keeps_average(self) -> bool: ...


def faults(config: Settings) -> Iterator[str]:
    """What does not go with the student as its own teacher or reference, and what to do."""
    yield from _sources(config)
    if config.teacher.source != "model":
        yield from _placed_elsewhere(config)
        yield from _says_nothing(config)
        yield from _under_way(config)
        yield from _whole_distributions(config)


def _sources(config: Settings) -> Iterator[str]:
    models, lora = config.models, config.lora
    if config.teacher.source == "model" and models.world is None and not (models.student and models.teacher):
        yield "give models.world, or both models.student and models.teacher (or teacher.source: the student as its own teacher)"
    for place, source in (("teacher.source", config.teacher.source), ("reference.source", config.reference.source)):
        if source == "base" and not lora.rank:
            remedy = "leave reference.source out: the initial weights are then loaded again"
            remedy = f"or {remedy}" if place.startswith("reference") else "or choose 'ema', or name a model"
            yield (
                f"{place} = 'base' is the frozen model under an adapter, but lora.rank is 0, so all weights are trained: set "
                f"lora.rank (16 is usual), {remedy}"
            )
    if config.reference.source != "model" and models.reference is not None:
        yield f"reference.source = {config.reference.source!r} needs no model: leave models.reference out"
    if config.keeps_average and lora.rank and config.ema.device is not None:
        yield (
            f"ema.device is {config.ema.device!r}, but with lora.rank = {lora.rank} only the adapter is averaged, and scoring "
            "elsewhere would need a copy of the frozen weights there: leave ema.device out"
        )

    attention = models.attention or ""
    if config.keeps_average and config.ema.device == "cpu" and attention.startswith("flash_attention"):
        yield f"ema.device is 'cpu', where models.attention = {attention!r} has no kernel: leave one of them out"


def _placed_elsewhere(config: Settings) -> Iterator[str]:
    """Settings of a model that is not there."""
    models, teacher = config.models, config.teacher
    given = {
        "models.teacher": models.teacher,
        "models.teacher_size": models.teacher_size,
        "models.teacher_tokenizer": models.teacher_tokenizer,
        "models.teacher_dtype": models.teacher_dtype,
        "models.teacher_device": models.teacher_device,
        "teacher.urls": teacher.urls,
        "teacher.name": teacher.name,
        "teacher.tokenizer": teacher.tokenizer if teacher.tokenizer not in (AUTO, STUDENT) else None,
        "models.teacher_offload": models.teacher_offload,
        "models.teacher_quantize": models.teacher_quantize if models.teacher_quantize != "none" else None,
        "teacher.cache": teacher.cache,
    }
    for name, value in given.items():
        if value:
            instead = ": its device is ema.device" if name == "models.teacher_device" and teacher.source == "ema" else ""
            yield (
                f"{name} is {value!r}, but teacher.source = {teacher.source!r} is {WORDS[teacher.source]}{instead}: leave one "
                "of them out"
            )


def _says_nothing(config: Settings) -> Iterator[str]:
    """A teacher that has the student's weights and sees what the student sees has the student's log-probs."""
    teacher = config.teacher
    if _sees_more(config):
        return
    remedy = "show it more than the student sees: teacher.user (with {answer} or a hint) or teacher.system"
    if teacher.source == "live":
        yield f"teacher.source = 'live' has the student's weights and sees its prompt, so the gap is 0 everywhere: {remedy}"
    if teacher.source != "live" and not otherwise_moved(config):
        yield (
            f"teacher.source = {teacher.source!r} begins with the student's log-probs, and nothing else moves it, so the "
            f"gap stays 0: {remedy}, or add a reward (reward.checker, reward.coefficient)"
        )


def _sees_more(config: Settings) -> bool:
    """Whether any setting may show the teacher another prompt than the student's."""
    teacher, data = config.teacher, config.data
    ours = {**THINKING_OFF, **data.chat_template_kwargs}
    template = teacher.chat_template is not None and teacher.chat_template != data.chat_template
    rendering = template or {**ours, **teacher.chat_template_kwargs} != ours
    return teacher.system is not None or teacher.user is not None or rendering


def otherwise_moved(config: Settings) -> bool:
    """Whether anything but the teacher moves the student, whose weights it has."""
    method = config.method.made
    entropy = float(getattr(method, "entropy_coef", 0.0))
    other = bool(config.teacher.others) or (method.needs_reference and config.models.reference is not None)
    return config.reward.added or config.rollout.mix.active or entropy > 0 or other


def _under_way(config: Settings) -> Iterator[str]:
    source = config.teacher.source
    if config.rollout.overlap and source in ("base", "live"):
        yield (
            f"rollout.overlap lets the teacher score while the student writes, but teacher.source = {source!r} is the same "
            "model: leave rollout.overlap out, or choose 'ema'"
        )
    mix = config.rollout.mix
    if mix.active and mix.source == "teacher":
        said = f"rollout.mix.source = 'teacher', but teacher.source = {source!r} is {WORDS[source]}"
        yield f"{said}: set rollout.mix.source = 'data'"
    if mix.active and mix.objective != "likelihood":
        yield (
            f"rollout.mix.objective = {mix.objective!r} needs a teacher of its own, and teacher.source = {source!r} is "
            f"{WORDS[source]}: set rollout.mix.objective = 'likelihood'"
        )


def _whole_distributions(config: Settings) -> Iterator[str]:
    """The loss makes the teacher's distributions of its states, kept since it scored, and its output matrix of that moment."""
    if not config.method.made.needs_teacher_distribution:
        return
    source, optim, lora = config.teacher.source, config.optim, config.lora
    likely = "or look at likely ids only (method.support = 'top-k')"
    updates = optim.ppo_epochs * optim.mini_batches
    if updates > 1 and not lora.rank:
        yield (
            f"the method ({config.method.made.who}) needs the teacher's whole distributions, and with teacher.source = "
            f"{source!r} its output matrix changes in each of a step's {updates} updates: set optim.ppo_epochs and "
            f"optim.mini_batches to 1, train an adapter (lora.rank), which leaves the matrix alone, {likely}"
        )
    if optim.shard and (source != "ema" or lora.rank):
        yield (
            f"optim.shard gives the student's weights back during the update, and the method ({config.method.made.who}) needs "
            f"the output matrix of the teacher, {WORDS[source]}, there: leave optim.shard out, {likely}"
        )
