"""The time of a step, stage by stage, and the best way to use the GPUs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from iwopd.cluster.plan import rates as known
from iwopd.cluster.plan.gpus import GPUS, Gpu, PlanError
from iwopd.cluster.plan.job import Job
from iwopd.cluster.plan.layout import MOST_ROWS, Layout, layouts
from iwopd.cluster.plan.models import Model
from iwopd.cluster.plan.rates import Rates
from iwopd.cluster.plan.rollouts import answer_lengths, decode_seconds, step_seconds
from iwopd.cluster.plan.work import all_flops, forward_flops, gathered_bytes

SAMPLE = 256
"""Lengths that stand for all of a step where their order does not matter."""

Limit = Literal["tail", "cache", "bandwidth", "compute", "network", ""]


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step."""

    rollout: float
    teacher: float
    """Of the teacher's own work, whether anybody waits for it or not."""
    teacher_waited: float
    """What of it comes on top of the rollouts."""
    old_logprobs: float
    reference: float
    update: float
    weight_sync: float
    other: float
    rows: int
    """Rows under way in one rollout engine."""
    rollout_limit: Limit
    update_limit: Limit

    @property
    def total(self) -> float:
        return (
            self.rollout
            + self.teacher_waited
            + self.old_logprobs
            + self.reference
            + self.update
            + self.weight_sync
            + self.other
        )

    def stages(self) -> dict[str, float]:
        """By name, in order; they add up to the step."""
        named = {
            "rollout": self.rollout,
            "teacher": self.teacher_waited,
            "old log-probs": self.old_logprobs,
            "reference": self.reference,
            "update": self.update,
            "weight sync": self.weight_sync,
            "other": self.other,
        }
        return {name: seconds for name, seconds in named.items() if seconds or name in ("rollout", "teacher", "update")}


@dataclass(frozen=True, eq=False)
class Plan:
    """What is estimated for a run."""

    job: Job
    layout: Layout
    typical: StepTime
    fast: StepTime
    slow: StepTime
    fitting: tuple[str, ...]
    """Where nothing fits: what would, as options of the command line."""

    @property
    def fits(self) -> bool:
        return self.layout.fits

    @property
    def gpus(self) -> int:
        return self.layout.nodes * self.layout.gpus_per_node

    def hours(self, time: StepTime) -> float:
        """Of the whole run."""
        return self.job.config.steps * time.total / 3600


def make_plan(job: Job, gpu: Gpu, nodes: int, gpus_per_node: int) -> Plan:
    """The fastest layout that fits; where none does, the one that is nearest to it."""
    best = _best(job, gpu, nodes, gpus_per_node)
    times = [_time(job, best, rates, factor) for rates, factor in ((known.TYPICAL, 1.0), (known.FAST, 0.5), (known.SLOW, 2.0))]
    fitting = () if best.fits else tuple(_alternatives(job, gpu, nodes, gpus_per_node))
    return Plan(job, best, times[0], times[1], times[2], fitting)


def _best(job: Job, gpu: Gpu, nodes: int, gpus_per_node: int) -> Layout:
    found = list(layouts(job, gpu, nodes, gpus_per_node))
    fitting = [layout for layout in found if layout.fits]
    if fitting:
        return min(fitting, key=lambda layout: step_time(job, layout, known.TYPICAL).total)
    return min(found, key=lambda layout: layout.overflow)


def _alternatives(job: Job, gpu: Gpu, nodes: int, gpus_per_node: int) -> list[str]:
    """Changes of one thing after which it fits."""
    found = []

    def fits(what: Gpu, how_many: int, each: int) -> bool:
        return any(layout.fits for layout in layouts(job, what, how_many, each))

    larger = sorted((other for other in GPUS.values() if other.memory > gpu.memory), key=lambda other: other.memory)
    if (other := next((one for one in larger if fits(one, nodes, gpus_per_node)), None)) is not None:
        found.append(f"--gpu {other.name}")
    if nodes * gpus_per_node == 1 and not job.config.lora.rank and job.teacher is not None:
        if (each := next((n for n in (2, 4, 8) if _possible(job, gpu, 1, n)), None)) is not None:
            found.append(f"--gpus-per-node {each}")
    elif nodes * gpus_per_node > 1:
        more = next((n for n in range(nodes + 1, 65) if _possible(job, gpu, n, gpus_per_node)), None)
        found += [f"--nodes {more}"] if more is not None else []
    return found


def _possible(job: Job, gpu: Gpu, nodes: int, gpus_per_node: int) -> bool:
    try:
        return any(layout.fits for layout in layouts(job, gpu, nodes, gpus_per_node))
    except PlanError:  # no split comes out even
        return False


def _time(job: Job, layout: Layout, rates: Rates, factor: float) -> StepTime:
    """With other rates and, where the length was assumed, another length."""
    if job.answer_assumed:
        job = replace(job, answer=max(1.0, min(float(job.longest_answer), job.answer * factor)))
    return step_time(job, layout, rates)


def step_time(job: Job, layout: Layout, rates: Rates) -> StepTime:
    """Seconds of one step, by stage."""
    config, gpu, student = job.config, layout.gpu, job.student
    lengths = answer_lengths(min(SAMPLE, job.rollouts), job.answer, job.longest_answer)
    scale = job.rollouts / len(lengths)
    rollout, rows, limit = _rollout(job, layout, rates)
    teacher, waited = _teacher(job, layout, rates, lengths, scale)
    if layout.engine == "verl":  # a rollout is scored as soon as it is written
        waited = max(waited, teacher - rollout)
    tokens = scale * sum(job.prompt + length for length in lengths)
    passes = math.ceil(tokens / layout.student_gpus / job.micro_batch)
    launching = passes * student.layers * known.own_sampler(rates).layer_seconds
    reached = layout.student_gpus * gpu.flops * _training_rate(student, rates)
    forward = max(scale * all_flops(student, job.prompt, lengths) / reached, launching)
    recompute = config.optim.gradient_checkpointing
    computing = scale * all_flops(student, job.prompt, lengths, update=True, recompute=recompute) / reached
    sending = (
        passes * gathered_bytes(student, recompute) / (layout.student_link * rates.link) if layout.student_gpus > 1 else 0.0
    )
    update = config.optim.ppo_epochs * max(computing, sending, (4 if recompute else 3) * launching)
    update_limit: Limit = "network" if sending > computing else "compute"
    sync = student.count.total * job.engine_bytes / rates.sync if _has_engine(job, layout) else 0.0
    other = rates.step_seconds if layout.engine == "verl" else 0.0
    reference = forward if job.config.method.made.needs_reference else 0.0
    return StepTime(rollout, teacher, waited, forward, reference, update, sync, other, rows, limit, update_limit)


def _has_engine(job: Job, layout: Layout) -> bool:
    return layout.engine == "verl" or job.engine_weights != "student"


def _training_rate(model: Model, rates: Rates) -> float:
    return rates.train_experts if model.count.experts else rates.train


def _rollout(job: Job, layout: Layout, rates: Rates) -> tuple[float, int, Limit]:
    """Seconds, rows under way, and what holds it up."""
    if layout.engine == "local" and job.engine_weights == "elsewhere":
        return 0.0, 0, ""  # somebody else's GPU, which the plan does not know
    if not _has_engine(job, layout):
        rates = known.own_sampler(rates)
    student, gpu, shards = job.student, layout.gpu, layout.rollout_shards
    mine = -(-job.rollouts // layout.engines)
    lengths = answer_lengths(mine, job.answer, job.longest_answer, everyone=job.rollouts)
    room = int(layout.cache_tokens // (job.prompt + job.answer))
    rows = max(1, min(room, mine, MOST_ROWS if _has_engine(job, layout) else mine))
    size = job.engine_bytes if _has_engine(job, layout) else job.weight_bytes
    how = {"shards": shards, "prompt": job.prompt, "most_rows": rows, "number_bytes": size}
    seconds = decode_seconds(student, gpu, rates, lengths=lengths, **how)
    score = rates.score_experts if student.count.experts else rates.score
    reading = mine * forward_flops(student, job.prompt, 1) / (shards * gpu.flops * score)
    alone = max(lengths) * step_seconds(student, gpu, rates, shards, 1, job.prompt + max(lengths) / 2, size)
    if alone > 0.5 * seconds:
        limit: Limit = "tail"
    elif room < mine and rows == room:
        limit = "cache"
    else:
        limit = "bandwidth"
    return seconds + reading, rows, limit


def _teacher(job: Job, layout: Layout, rates: Rates, lengths: list[int], scale: float) -> tuple[float, float]:
    """Seconds of all scores, and of those of the longest answer, which comes last."""
    teacher = job.teacher
    if teacher is None or (job.config.models.teacher_device is not None and layout.engine == "local"):
        return 0.0, 0.0
    flops = scale * all_flops(teacher, job.prompt, lengths)
    if layout.engine == "local":
        seconds = flops / (layout.gpu.flops * _training_rate(teacher, rates))  # transformers, as in training
        return seconds, seconds
    rate = layout.gpu.flops * (rates.score_experts if teacher.count.experts else rates.score)
    last = forward_flops(teacher, job.prompt + max(lengths), max(lengths)) / (layout.teacher_shards * rate)
    return flops / (layout.teacher_gpus * rate), last


def split_settings(plan: Plan) -> list[str]:
    """Settings that the layout needs where they are not what the recipe has."""
    layout, settings = plan.layout, plan.job.config.cluster
    if layout.engine == "local":
        return []
    chosen = [f"--cluster.teacher_gpus {layout.teacher_gpus}"] if settings.teacher_gpus != layout.teacher_gpus else []
    if settings.teacher_tensor_parallel != layout.teacher_shards:
        chosen.append(f"--cluster.teacher_tensor_parallel {layout.teacher_shards}")
    if plan.job.config.engine.vllm.tensor_parallel != layout.rollout_shards:
        chosen.append(f"--engine.vllm.tensor_parallel {layout.rollout_shards}")
    return chosen
