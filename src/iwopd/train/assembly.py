"""From settings to the parts of a run: models, prompts, sampler, scorers, learner, task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch import Tensor

from iwopd import tiny
from iwopd.adapters import adapter_off
from iwopd.algo.objectives import Objective
from iwopd.algo.views import Wanted
from iwopd.config import Config, ConfigError
from iwopd.data.chat import Chat
from iwopd.data.prompts import DataError, MixedOrder, PromptOrder, load_prompts
from iwopd.data.sets import LoadedPrompts, load_set, prompt_set
from iwopd.eval.catalog import find_task, load_task
from iwopd.eval.task import Task, one_by_one
from iwopd.lm import HeadCheck, ResponseModel, Sequences
from iwopd.models import ModelSource, load_tokenizer, stop_ids
from iwopd.rollout.engine import ENGINES, Engine, Student
from iwopd.rollout.sampler import Sampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.rope import fix_rope
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.scorer import Scorer
from iwopd.train.attention import flash_refuses
from iwopd.train.horizon import check_following, horizon_refuses
from iwopd.train.kept_states import KEPT_STATES, followed_for, keeps_states
from iwopd.train.learner import Learner
from iwopd.train.loading import (
    check_trainable,
    load_reference,
    load_student,
    load_teacher,
    open_world,
    reference_source,
    source_of,
)
from iwopd.train.micro_batch import Distributions
from iwopd.train.ranks import Ranks, launched
from iwopd.train.reward import Rewards, reward_refuses
from iwopd.train.teachers import build_teacher, check_teacher_device, scores_early
from iwopd.train.tokenizers import TEACHER, Foreign, foreign_refuses, foreign_tokenizers, token_ratio
from iwopd.types import Prompt
from iwopd.vocabulary import check_vocabulary

Notify = Callable[[str], None]
HEAD_TOKENS = 256
"""On so many tokens heads are compared, and the student's modes."""
TRAINING = 1e-3
"""Largest difference of log-probs between training and eval mode."""
TRAINING_HALF = 5e-2
"""The same in half precision, where the modes may take different kernels."""


@dataclass
class Parts:
    """What the loop works with. A context manager: leaving it closes the engine."""

    tokenizer: Any
    student: Any
    order: PromptOrder | MixedOrder
    objective: Objective
    sampler: Sampler
    eval_samplers: dict[str, Sampler]
    """By task."""
    student_scorer: LocalScorer
    teacher_scorer: Scorer
    reference_scorer: Scorer | None
    learner: Learner
    heads: dict[str, HeadCheck]
    """Of every model in this process, by name."""
    tasks: list[Task]
    ranks: Ranks
    engine: Engine
    """Shared by the samplers."""
    max_response: int
    """Most tokens of a rollout."""
    score_early: bool
    """The teacher scores finished answers while others are being written."""
    teacher_wanted: Wanted
    """What it is asked for beside log-probs."""
    followed: Wanted
    """The same of a teacher that follows answers: which ids the student finds likeliest is not known yet."""
    rewards: Rewards | None = None
    """Who judges the rollouts; None: nobody."""

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def before_writing(self) -> None:
        """Called by all ranks before they write. An engine elsewhere has one copy of the weights for all: it gets them here."""
        if self.engine.weights == "elsewhere":
            self.ranks.together(self.engine.update_weights)


def assemble(config: Config, notify: Notify, progress: tiny.PretrainingListener | None = None) -> Parts:
    """Load or train the models and build everything from them."""
    for refused in (*flash_refuses(config), *reward_refuses(config), *horizon_refuses(config)):
        raise ConfigError(f"{refused.message}: {refused.remedy}")
    check_trainable(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    check_teacher_device(config, launched().here)
    patience = InitProcessGroupKwargs(timeout=timedelta(seconds=config.rank_timeout))
    accelerator = Accelerator(mixed_precision=config.precision, kwargs_handlers=[patience])
    set_seed(config.seed)
    if config.models.world is not None:
        check_support(config, len(tiny.build_tokenizer()))
    world = open_world(config, progress)
    tokenizer, student, teacher, foreign = _models(config, world, accelerator.device)
    vocab_size = len(tokenizer)
    order = prompt_order(config, world, tokenizer, notify)
    rewards = Rewards.of(config, tokenizer, order.prompts)
    max_tokens = config.rollout.max_tokens or (world.max_response_tokens if world else 0)
    if not max_tokens:
        raise ConfigError("rollout.max_tokens is needed when no embedded world says how long answers are")
    tasks = load_tasks(config, world, tokenizer, max_tokens)
    in_tasks = [len(prompt.token_ids) + task.max_tokens for task in tasks for prompt in task.prompts]
    longest = max([config.data.max_prompt_tokens + max_tokens, *in_tasks])
    ranks = Ranks()

    def scorer(model: Any, ids: int = vocab_size, length: int = longest, **options: Any) -> LocalScorer:
        fix_rope(model, length)
        shared: dict[str, Any] = {"temperature": config.rollout.temperature, "head_precision": config.head_products}
        return LocalScorer(model, vocab_size=ids, **shared, **options)

    def local_teacher(source: str | None, own: Any) -> LocalScorer:
        """`own`: the tokenizer whose ids it reads."""
        model = teacher if source is None else _other_teacher(config, source, own, accelerator.device)
        return scorer(model, len(own), longest if own is tokenizer else math.ceil(longest * token_ratio(own, order.prompts)))

    student_scorer = scorer(student, autocast=accelerator.autocast)
    teacher_scorer = build_teacher(config, tokenizer, order.prompts, max_tokens, local_teacher, foreign)
    reference_scorer = _reference_scorer(config, world, tokenizer, student, scorer, accelerator)
    scorers = {"student": student_scorer, "teacher": teacher_scorer, "reference": reference_scorer}
    heads = check_heads(scorers, order.prompts)
    check_following(config, teacher_scorer, order.prompts)
    objective = config.method.made
    whole = _whole_distributions(config, teacher_scorer)
    most_tokens = config.rollout.prompts_per_step * config.rollout.samples * max_tokens
    most = most_tokens * (whole.state_bytes if whole else 0)
    most_states = most_tokens * 4 * (teacher.config.get_text_config().hidden_size if teacher is not None else 0)
    again = whole is not None and whole.model is not None
    states = keeps_states(objective, again=again, most=most, ranks=ranks.count)
    wanted = replace(objective.asks.teacher, states=states)
    learner = Learner(student_scorer.lm, config.optim, objective, ranks, whole)
    check_training_mode(student_scorer.lm, order.prompts)
    # Last, because it may start processes: whatever fails before leaves nothing open.
    engine = _open_engine(config, student, tokenizer, longest, ranks)
    stops = stop_ids(tokenizer, student) | frozenset(tokenizer.convert_tokens_to_ids(config.rollout.stop_tokens))

    def sampler(limit: int, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Sampler:
        return engine.sampler(SamplingSettings(limit, temperature, top_p, top_k, stops))

    try:
        return Parts(
            tokenizer=tokenizer,
            student=student,
            order=order,
            objective=learner.objective,
            sampler=sampler(max_tokens, config.rollout.temperature, config.rollout.top_p, config.rollout.top_k),
            eval_samplers={task.name: sampler(task.max_tokens, task.temperature) for task in tasks},
            student_scorer=student_scorer,
            teacher_scorer=teacher_scorer,
            reference_scorer=reference_scorer,
            learner=learner,
            heads=heads,
            tasks=tasks,
            ranks=ranks,
            engine=engine,
            max_response=max_tokens,
            score_early=scores_early(config) and not objective.asks.student_first,
            teacher_wanted=wanted,
            followed=followed_for(wanted, keeps=teacher_scorer.whole_distribution is not None and most_states <= KEPT_STATES),
            rewards=rewards,
        )
    except BaseException:
        engine.close()
        raise


def _whole_distributions(config: Config, teacher: Scorer) -> Distributions | None:
    """The teacher's output matrix, if the method needs whole distributions; refuses one whose logits are not its matrix's."""
    if not config.method.made.asks.teacher.states:
        return None
    if "states" not in teacher.gives:
        raise ConfigError(
            f"the method ({config.method.made.who}) needs the teacher's output matrix, but its logits are not those of the "
            "matrix (a soft cap or a scale): choose another teacher, or objective 'policy-gradient' with advantage 'opd'"
        )
    return Distributions(teacher.output_matrix(), teacher.whole_distribution)


def check_support(config: Config, vocabulary: int) -> None:
    """Refuse more likeliest ids than there are, before a model is loaded."""
    asked = config.method.made.asks
    if (most := max(asked.student.top_k, asked.teacher.top_k)) > vocabulary:
        of_method = config.method.made.compared_ids or "k" in getattr(config.method.made, "advantage_params", {})
        where = "method.k" if of_method else "method.params.k"
        raise ConfigError(f"{where} is {most}, but the vocabulary has {vocabulary} ids: choose a k of at most that")


def check_heads(scorers: Mapping[str, Scorer | None], prompts: Sequence[Prompt]) -> dict[str, HeadCheck]:
    """Compare the fused head of every model here with its own logits, on a few hundred tokens of real prompts."""
    sequences, found = _trial(prompts), {}
    for kind, scorer in ((kind, scorer) for kind, scorer in scorers.items() if scorer):
        local = scorer.local(kind)
        readers = {path.model_name: path.reader for path in scorer.paths(kind)} if local else {}
        for name, one in local.items():
            reader = readers.get(name)
            own = sequences if reader is None else _trial([reader.see(prompt) for prompt in prompts[:HEAD_TOKENS]])
            found[name] = one.check_head(own, trained=name == "student")
    return found


def check_training_mode(student: ResponseModel, prompts: Sequence[Prompt]) -> None:
    """Refuse a student that is still random in training mode when its dropout is off, on the same tokens."""
    difference = student.training_difference(_trial(prompts))
    if not difference <= (TRAINING_HALF if student.half else TRAINING):
        raise ConfigError(
            f"the student, a {type(student.model).__name__}, has other log-probs in training mode (by up to {difference:.2g}) "
            "for the same tokens: something in it is random there, and it is no dropout that could be found and switched off. "
            "Set the rate of it to 0 in the config.json of models.student, or choose another student"
        )


def _trial(prompts: Sequence[Prompt]) -> Sequences:
    """A few hundred tokens of real prompts as responses."""
    pieces: list[Tensor] = []
    for prompt in prompts:
        room = HEAD_TOKENS - sum(map(len, pieces))
        if room < 2:
            break
        ids = prompt.token_ids if len(prompt.token_ids) > 1 else prompt.token_ids * 2
        pieces.append(torch.tensor(ids[:room]))
    return Sequences.build([piece[:1] for piece in pieces], [piece[1:] for piece in pieces])


def _open_engine(config: Config, student: Any, tokenizer: Any, longest: int, ranks: Ranks) -> Engine:
    name = config.rollout.engine
    if ranks.count > 1 and not ENGINES[name].several_ranks:
        raise ConfigError(
            f"rollout.engine = {name!r} feeds one training process, and there are {ranks.count}: start one, or set "
            "rollout.engine = 'local' or 'vllm'"
        )
    about = Student.of(
        student,
        tokenizer,
        longest=longest,
        dtype=config.models.dtype,
        computes=config.compute_dtype,
        seed=config.seed,
        rank=ranks.rank,
        ranks=ranks.count,
    )
    return ENGINES[name](about, config.engine.of(name))


def _models(config: Config, world: tiny.World | None, device: torch.device) -> tuple[Any, Any, Any, Foreign]:
    """Tokenizer, student and teacher (None where a server has it), and the tokenizers of teachers that differ."""
    student_source, teacher_source = source_of(config, "student", world), source_of(config, "teacher", world)
    assert student_source is not None  # the config was validated
    assert teacher_source is not None
    trust = config.models.trust_remote_code
    tokenizer = world.tokenizer if world is not None else load_tokenizer(student_source, trust_remote_code=trust)
    check_support(config, len(tokenizer))
    foreign = foreign_tokenizers(config, tokenizer, teacher_source)
    for refused in foreign_refuses(config, foreign):
        raise ConfigError(f"{refused.message}: {refused.remedy}")
    student = load_student(config, student_source, device)
    check_vocabulary("student", student, tokenizer)
    if config.teacher.urls:
        return tokenizer, student, None, foreign
    teacher = load_teacher(config, teacher_source, device)
    check_vocabulary("teacher", teacher, foreign.get(TEACHER, tokenizer))
    return tokenizer, student, teacher, foreign


def _other_teacher(config: Config, path: str, tokenizer: Any, device: torch.device) -> Any:
    """One of several teachers; the doctor looks at the first one only."""
    teacher = load_teacher(config, ModelSource.of(path), device)
    check_vocabulary("teacher", teacher, tokenizer)
    return teacher


def _reference_scorer(
    config: Config,
    world: tiny.World | None,
    tokenizer: Any,
    student: Any,
    scorer: Callable[..., LocalScorer],
    accelerator: Accelerator,
) -> Scorer | None:
    """Scores under the reference, where the method needs one: a model of its own, or the student without its adapter.

    It runs in the student's precision, so that a student that has not moved has the reference's log-probs.
    """
    if not config.method.made.needs_reference:
        return None
    source = reference_source(config, world)
    if source is None:

        @contextmanager
        def before_training() -> Iterator[None]:
            with accelerator.autocast(), adapter_off(student):
                yield

        return scorer(student, autocast=before_training)
    model = load_reference(config, source, accelerator.device)
    check_vocabulary("reference", model, tokenizer)
    return scorer(model, autocast=accelerator.autocast)


def prompt_order(config: Config, world: tiny.World | None, tokenizer: Any, notify: Notify) -> PromptOrder | MixedOrder:
    """Which prompts each step gets, from the world, the one file, or the sets."""
    per_step = config.rollout.prompts_per_step
    if world is not None:
        return PromptOrder(world.prompts(config.data.train_size), per_step, config.seed)
    loaded = training_sets(config, tokenizer)
    for item in loaded:
        if item.too_long or item.filtered or item.duplicates or len(loaded) > 1:
            notify(item.summary(config.data.max_prompt_tokens))
    if len(loaded) == 1:
        return PromptOrder(loaded[0].prompts, per_step, config.seed)
    weighted = [(item, given.weight) for item, given in zip(loaded, config.data.sets, strict=True)]
    return MixedOrder(weighted, per_step, config.seed)


def training_sets(config: Config, tokenizer: Any) -> list[LoadedPrompts]:
    """The file of `data.prompts`, or every set of `data.sets`, read and rendered."""
    most, chat = config.data.max_prompt_tokens, Chat(tokenizer)
    if not config.data.sets:
        return [load_prompts(Path(str(config.data.prompts)), chat, most)]
    chosen = [prompt_set(**item.model_dump(exclude_none=True, exclude={"weight"})) for item in config.data.sets]
    names = [item.name for item in chosen]
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"two sets of data.sets are called {twice[0]!r}: give one of them another name")
    return [load_set(item, chat, most) for item in chosen]


def load_tasks(config: Config, world: tiny.World | None, tokenizer: Any, max_tokens: int) -> list[Task]:
    """What is evaluated in training: the named tasks, or the world's own."""
    settings = config.eval
    unread = [name for name in settings.data if name not in settings.tasks]
    if not settings.prompts:
        tasks = []
    elif unread:
        raise ConfigError(f"eval.data names {unread[0]!r}, which is not among eval.tasks ({', '.join(settings.tasks)})")
    elif world is not None and not settings.tasks:
        tasks = [Task("tiny", world.eval_prompts(settings.prompts), one_by_one(world.check))]
    else:
        files = {name: Path(path) for name, path in settings.data.items()}
        tasks = [load_task(find_task(name), tokenizer, data=files.get(name), limit=settings.prompts) for name in settings.tasks]
    names = [task.name for task in tasks]
    if config.checkpoint.best is not None and config.checkpoint.best not in names:
        raise ConfigError(f"checkpoint.best is {config.checkpoint.best!r}, but the evaluated tasks are {names}")
    limit = settings.max_tokens or max_tokens
    samples = settings.samples if settings.temperature else 1
    return [replace(task, samples=samples, temperature=settings.temperature, max_tokens=limit) for task in tasks]
