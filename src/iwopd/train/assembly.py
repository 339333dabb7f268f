"""From settings to the parts of a run: models, prompts, sampler, scorers, learner, task."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch import Tensor

from iwopd import tiny
from iwopd.config import Config, ConfigError
from iwopd.lm import Context, HeadCheck, ResponseModel, Sequences
from iwopd.models import ModelSource, load_tokenizer, stop_ids
from iwopd.rollout.engine import ENGINES, Engine, Student
from iwopd.rollout.sampler import Sampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.rope import fix_rope
from iwopd.runs.owner import owned
from iwopd.stages import StageListener
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.offload import OffloadedScorer
from iwopd.teacher.scorer import Scorer
from iwopd.train.attention import flash_refuses
from iwopd.train.authors import DataAuthor, build_author
from iwopd.train.average import Average
from iwopd.train.chats import check_chats, student_chat
from iwopd.train.horizon import check_following, horizon_refuses
from iwopd.train.kept_states import KEPT_STATES, followed_for, keeps_others_states, keeps_states
from iwopd.train.learner import Learner
from iwopd.train.loading import (
    check_trainable,
    load_reference,
    load_student,
    load_teacher,
    open_world,
    reference_source,
    reference_weights,
    source_of,
)
from iwopd.train.micro_batch import Distributions
from iwopd.train.mix import Others, mix_needs_states, mixed_loss
from iwopd.train.own_weights import own_weights
from iwopd.train.parts import Parts
from iwopd.train.prompts import load_tasks, prompt_order
from iwopd.train.ranks import Ranks, launched
from iwopd.train.reward import Rewards, reward_refuses
from iwopd.train.teacher_cache import caches_of
from iwopd.train.teachers import build_teacher, check_named_devices, check_teacher_device, scores_early
from iwopd.train.thinking import ThinkingTokens, teaching_tokens
from iwopd.train.tokenizers import TEACHER, Foreign, foreign_refuses, foreign_tokenizers, token_ratio
from iwopd.types import Prompt
from iwopd.vocabulary import check_vocabulary

Notify = Callable[[str], None]
HEAD_TOKENS = 128
"""On so many tokens heads are compared, and the student's modes: the echo test looks at more, and at far ones."""
TRAINING = 1e-3
"""Largest difference of log-probs between training and eval mode."""
TRAINING_HALF = 5e-2
"""The same in half precision, where the modes may take different kernels."""


def assemble(
    config: Config, notify: Notify, progress: tiny.PretrainingListener | None = None, stages: StageListener | None = None
) -> Parts:
    """Load or train the models and build everything from them; `stages` hears what takes long."""
    stages = stages or StageListener()
    for refused in (*flash_refuses(config), *reward_refuses(config), *horizon_refuses(config)):
        raise ConfigError(f"{refused.message}: {refused.remedy}")
    check_trainable(config)
    ENGINES[config.rollout.engine].check_here()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    check_named_devices(config)
    check_teacher_device(config, launched().here)
    patience = InitProcessGroupKwargs(timeout=timedelta(seconds=config.rank_timeout))
    accelerator = Accelerator(mixed_precision=config.precision, kwargs_handlers=[patience])
    set_seed(config.seed)
    if config.models.world is not None:
        check_support(config, len(tiny.build_tokenizer()))
    world = open_world(config, progress)
    tokenizer, student, teacher, foreign = _models(config, world, accelerator.device, stages)
    stages.stage("reading prompts and tasks", 0)
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

    def scorer(model: Any, autocast: Context = nullcontext, *, ids: int = vocab_size, length: int = longest) -> LocalScorer:
        fix_rope(model, length)
        shared: dict[str, Any] = {"temperature": config.rollout.temperature, "head_precision": config.head_products}
        return LocalScorer(model, vocab_size=ids, autocast=autocast, **shared)

    average = Average(student, config.ema.decay, config.ema.device) if config.keeps_average else None

    def of_student(weights: str) -> LocalScorer:
        return scorer(*own_weights(weights, student, average, accelerator))

    offloaded: list[OffloadedScorer] = []

    def local_teacher(source: str | None, own: Any) -> LocalScorer:
        """`own`: the tokenizer whose ids it reads."""
        if source is None and config.teacher.is_student:
            return of_student(config.teacher.source)
        model = teacher if source is None else _other_teacher(config, source, own, accelerator.device)
        length = longest if own is tokenizer else math.ceil(longest * token_ratio(own, order.prompts))
        found = scorer(model, ids=len(own), length=length)
        if not config.models.teacher_offload:
            return found
        offloaded.append(OffloadedScorer.of(found))
        return offloaded[-1]

    stages.stage("asking the teacher's servers" if config.teacher.has_servers else "preparing the models", 0)
    student_scorer = of_student("live")
    teacher_scorer = build_teacher(config, tokenizer, order.prompts, max_tokens, local_teacher, foreign)
    if any(not one.moves for one in offloaded):
        notify("models.teacher_offload does nothing here: the teacher is on the CPU already")
    reference_scorer = _reference_scorer(config, world, tokenizer, of_student, scorer, accelerator)
    scorers = {"student": student_scorer, "teacher": teacher_scorer, "reference": reference_scorer}
    stages.stage("comparing the heads of the models with their own logits", 0)
    heads = check_heads(scorers, order.prompts)
    check_following(config, teacher_scorer, order.prompts)
    objective = config.method.made
    whole = _whole_distributions(config, teacher_scorer)
    most_tokens = config.rollout.prompts_per_step * config.rollout.samples * max_tokens
    most = most_tokens * (whole.state_bytes if whole else 0)
    here = student if config.teacher.is_student else teacher
    most_states = most_tokens * 4 * (here.config.get_text_config().hidden_size if here is not None else 0)
    again = whole is not None and whole.model is not None
    states = keeps_states(objective, again=again, most=most, ranks=ranks.count)
    wanted = replace(objective.asks.teacher, states=states)
    learner = Learner(student_scorer.lm, config.optim, objective, ranks, whole, mixed_loss(config), average)
    check_training_mode(student_scorer.lm, order.prompts)
    stops = stop_ids(tokenizer, student) | frozenset(tokenizer.convert_tokens_to_ids(config.rollout.stop_tokens))
    others, thinking = None, ThinkingTokens.of(config, tokenizer)
    if config.rollout.mix.active:
        author = build_author(config, student_chat(config, tokenizer), order.prompts, stops, max_tokens, teacher_scorer, ranks)
        kept = keeps_others_states(objective, own=states, again=again, most=most, ranks=ranks.count)
        of_data = author.fingerprint(order.prompts) if isinstance(author, DataAuthor) else ""
        whose = mix_needs_states(config) and kept
        others = Others(config.rollout.mix, config.seed, author, whose, teaching_tokens(config, thinking), of_data)
    # Last, because it may start processes: whatever fails before leaves nothing open.
    stages.stage(f"opening the engine {config.rollout.engine}", 0)
    engine, held = _open_engine(config, student, tokenizer, longest, ranks), ExitStack()

    def hold() -> None:
        """Two runs that send weights through one folder would write with each other's."""
        if engine.folder is not None and ranks.is_main:
            held.enter_context(
                owned(engine.folder, notify, f"set engine.{config.rollout.engine}.weights_folder to another one")
            )

    def sampler(limit: int, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Sampler:
        return engine.sampler(SamplingSettings(limit, temperature, top_p, top_k, stops))

    try:
        ranks.together(hold)
        return Parts(
            held=held,
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
            others=others,
            thinking=thinking,
            offloaded=offloaded,
            caches=caches_of(teacher_scorer),
            foreign=foreign,
        )
    except BaseException:
        engine.close()
        held.close()
        raise


def _whole_distributions(config: Config, teacher: Scorer) -> Distributions | None:
    """The teacher's output matrix, if the loss needs whole distributions; refuses one whose logits are not its matrix's."""
    if not (config.method.made.asks.teacher.states or mix_needs_states(config)):
        return None
    if "states" not in teacher.gives:
        method, mix = config.method.made, config.rollout.mix
        who, remedy = f"the method ({method.who})", "objective 'policy-gradient' with advantage 'opd'"
        if not method.asks.teacher.states:
            who, remedy = f"rollout.mix.objective = {mix.objective!r}", "rollout.mix.objective = 'likelihood'"
        raise ConfigError(
            f"{who} needs the teacher's output matrix, but its logits are not those of the matrix (a soft cap or a scale): "
            f"choose another teacher, or {remedy}"
        )
    if not (config.method.made.needs_teacher_distribution or mix_needs_states(config)):
        return None  # states are asked for, but not by the loss
    return Distributions(teacher.output_matrix(), teacher.whole_distribution if config.teacher_stays else None)


def check_support(config: Config, vocabulary: int) -> None:
    """Refuse more likeliest ids than there are, before a model is loaded."""
    asked = config.method.made.asks
    if (most := max(asked.student.top_k, asked.teacher.top_k)) > vocabulary:
        of_method = config.method.made.compared_ids or "k" in getattr(config.method.made, "advantage_params", {})
        where = "method.k" if of_method else "method.params.k"
        raise ConfigError(f"{where} is {most}, but the vocabulary has {vocabulary} ids: choose a k of at most that")


def check_heads(scorers: Mapping[str, Scorer | None], prompts: Sequence[Prompt]) -> dict[str, HeadCheck]:
    """Compare the fused head of every model here with its own logits, on tokens of real prompts."""
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
    """Some tokens of real prompts as responses."""
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


def _models(
    config: Config, world: tiny.World | None, device: torch.device, stages: StageListener
) -> tuple[Any, Any, Any, Foreign]:
    """Tokenizer, student, teacher (None where a server has it, or the student is its own), and tokenizers that differ."""
    student_source, teacher_source = source_of(config, "student", world), source_of(config, "teacher", world)
    assert student_source is not None  # the config was validated
    trust = config.models.trust_remote_code
    tokenizer = world.tokenizer if world is not None else load_tokenizer(student_source, trust_remote_code=trust)
    check_support(config, len(tokenizer))
    check_chats(config, tokenizer)
    foreign = foreign_tokenizers(config, tokenizer, teacher_source)
    for refused in foreign_refuses(config, foreign):
        raise ConfigError(f"{refused.message}: {refused.remedy}")
    stages.stage("loading the student", 0)
    student = load_student(config, student_source, device)
    check_vocabulary("student", student, tokenizer)
    if config.teacher.urls or teacher_source is None:
        return tokenizer, student, None, foreign
    stages.stage("loading the teacher", 0)
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
    of_student: Callable[[str], LocalScorer],
    scorer: Callable[[Any, Context], LocalScorer],
    accelerator: Accelerator,
) -> Scorer | None:
    """Scores under the reference, where the method needs one: a model of its own, or weights of the student.

    It runs in the student's precision, so that a student that has not moved has the reference's log-probs.
    """
    weights, source = reference_weights(config, world), reference_source(config, world)
    if weights is None:
        return None
    if source is None:
        return of_student(weights)
    model = load_reference(config, source, accelerator.device)
    check_vocabulary("reference", model, tokenizer)
    return scorer(model, accelerator.autocast)
