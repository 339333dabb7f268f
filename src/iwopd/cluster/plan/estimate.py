"""The time of a step, stage by stage, and the best way to use the GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, get_type_hints

from iwopd.cluster.plan import rates as known
from iwopd.cluster.plan.gpus import GPUS, Gpu, PlanError
from iwopd.cluster.plan.horizon import CutLengths, Priced, priced
from iwopd.cluster.plan.layout import MOST_ROWS, Layout, Trainer, layouts
from iwopd.cluster.plan.rates import Rates
from iwopd.cluster.plan.rollouts import decode_seconds, step_seconds
from iwopd.cluster.plan.work import all_flops, distribution_flops, forward_flops, gathered_bytes, reduced_bytes
from iwopd.cluster.plan.workload import SAMPLE, Workload
from iwopd.rollout.horizons import Drift

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
        return sum(self.stages().values())

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

    work: Workload
    layout: Layout
    typical: StepTime
    fast: StepTime
    slow: StepTime
    fitting: tuple[str, ...]
    """Where nothing fits: what would, as options of the command line."""
    horizon: Priced
    """How the horizon was priced: `work` and the times are with it."""
    full: StepTime
    """Typical, with answers to their end."""

    @property
    def fits(self) -> bool:
        return self.layout.fits

    @property
    def gpus(self) -> int:
        return self.layout.nodes * self.layout.gpus_per_node

    def hours(self, time: StepTime) -> float:
        """Of the whole run."""
        return self.work.config.steps * time.total / 3600


def make_plan(
    work: Workload,
    gpu: Gpu,
    nodes: int,
    gpus_per_node: int,
    cut: Sequence[CutLengths] = (),
    trainer: Trainer | None = None,
) -> Plan:
    """The fastest layout that fits; where none does, the one that is nearest to it. `cut`: what a probe knows of horizons."""
    best = _best(work, gpu, nodes, gpus_per_node, trainer)
    horizon = priced(work, cut)
    cases = ((known.TYPICAL, 1.0), (known.FAST, 0.5), (known.SLOW, 2.0))

    def over_training(rates: Rates, factor: float) -> StepTime:
        return mean_time([step_time(_other_length(one, factor), best, rates) for one in horizon.steps])

    typical, fast, slow = (over_training(rates, factor) for rates, factor in cases)
    fitting = () if best.fits else tuple(_alternatives(work, gpu, nodes, gpus_per_node, trainer))
    nobody = _best(horizon.whole, gpu, nodes, gpus_per_node, trainer) if work.follows else best  # no cache of a teacher
    full = step_time(horizon.whole, nobody, known.TYPICAL)
    return Plan(horizon.middle, best, typical, fast, slow, fitting, horizon, full)


def mean_time(times: Sequence[StepTime]) -> StepTime:
    """Of several steps; what holds them up is that of the last."""
    seconds = [name for name, kind in get_type_hints(StepTime).items() if kind is float]
    return replace(times[-1], **{name: sum(getattr(time, name) for time in times) / len(times) for name in seconds})


def _best(work: Workload, gpu: Gpu, nodes: int, gpus_per_node: int, trainer: Trainer | None) -> Layout:
    found = list(layouts(work, gpu, nodes, gpus_per_node, trainer))
    if fitting := [layout for layout in found if layout.fits]:
        return min(fitting, key=lambda layout: step_time(work, layout, known.TYPICAL).total)
    return min(found, key=lambda layout: layout.overflow)


def _alternatives(work: Workload, gpu: Gpu, nodes: int, gpus_per_node: int, trainer: Trainer | None) -> Iterator[str]:
    """Changes of one thing after which it fits."""

    def fits(what: Gpu, how_many: int, each: int, work: Workload = work) -> bool:
        try:
            return any(layout.fits for layout in layouts(work, what, how_many, each, trainer))
        except PlanError:  # no split comes out even
            return False

    if trainer == "local" and nodes * gpus_per_node > 1 and not work.config.optim.shard:
        optim = work.config.optim.model_copy(update={"shard": True})
        sharded = replace(work, config=work.config.model_copy(update={"optim": optim}))
        if not work.config.lora.rank and fits(gpu, nodes, gpus_per_node, sharded):
            yield "--optim.shard true"
    asked = work.config.cluster.teacher_tensor_parallel if trainer != "local" else gpus_per_node
    for more in (asked * 2**power for power in range(1, 4) if asked * 2**power <= gpus_per_node):
        if fits(gpu, nodes, gpus_per_node, _with_shards(work, more)):
            yield f"--cluster.teacher_tensor_parallel {more}"
            break
    larger = sorted((other for other in GPUS.values() if other.memory > gpu.memory), key=lambda other: other.memory)
    yield from islice((f"--gpu {other.name}" for other in larger if fits(other, nodes, gpus_per_node)), 1)
    if nodes * gpus_per_node == 1:
        yield from islice((f"--gpus-per-node {n}" for n in (2, 4, 8) if fits(gpu, 1, n)), 1)
    else:
        yield from islice((f"--nodes {n}" for n in range(nodes + 1, 65) if fits(gpu, n, gpus_per_node)), 1)


def _with_shards(work: Workload, shards: int) -> Workload:
    """With so many GPUs for a copy of a teacher."""
    cluster = work.config.cluster.model_copy(update={"teacher_tensor_parallel": shards})
    return replace(work, config=work.config.model_copy(update={"cluster": cluster}))


def _other_length(work: Workload, factor: float) -> Workload:
    """With another mean length of an answer, where it was assumed."""
    answer = max(1.0, min(float(work.longest_answer), work.answer * factor))
    return replace(work, answer=answer) if work.answer_assumed else work


def step_time(work: Workload, layout: Layout, rates: Rates) -> StepTime:
    """Seconds of one step, by stage."""
    config, gpu, student = work.config, layout.gpu, work.student
    lengths = work.lengths(min(SAMPLE, work.rollouts))
    groups = [(lengths, work.own / len(lengths))]
    if work.others:
        groups.append((whole := work.others_lengths(min(SAMPLE, work.others)), work.others / len(whole)))
    rollout, rows, limit = _rollout(work, layout, rates) if work.own else (0.0, 0, "")
    rollout += _others(work, layout, rates)
    teacher, waited = _teachers(work, layout, rates, lengths, work.own / len(lengths), rows)
    if layout.trainer == "verl":  # a rollout is scored as soon as it is written
        waited = max(waited, teacher - rollout)
    tokens = sum(scale * sum(work.prompt + length for length in found) for found, scale in groups)
    passes = math.ceil(tokens / layout.student_gpus / work.micro_batch)
    launching = passes * student.layers * rates.launch_seconds
    reached = layout.student_gpus * gpu.flops * rates.training(student)
    forward = max(sum(scale * all_flops(student, work.prompt, found) for found, scale in groups) / reached, launching)
    recompute = config.optim.gradient_checkpointing
    trained = sum(scale * all_flops(student, work.prompt, found, update=True, recompute=recompute) for found, scale in groups)
    computing = trained / reached + _distributions(work, layout, rates, lengths, work.own / len(lengths))
    sending = _sent(work, layout, passes, recompute) / (layout.student_link * rates.link)
    return StepTime(
        rollout=rollout,
        teacher=teacher,
        teacher_waited=waited,
        old_logprobs=forward,
        reference=forward if config.method.made.needs_reference else 0.0,
        update=config.optim.ppo_epochs * max(computing, sending, (4 if recompute else 3) * launching),
        weight_sync=student.count.total * work.writing_bytes(layout.trainer) / rates.sync if _has_engine(work, layout) else 0.0,
        other=rates.step_seconds if layout.trainer == "verl" else 0.0,
        rows=rows,
        rollout_limit=limit,
        update_limit="network" if sending > computing else "compute",
    )


def _sent(work: Workload, layout: Layout, passes: int, recompute: bool) -> float:
    """Bytes through a GPU's link: weights and gradients of every micro-batch where they are sharded, else gradients only."""
    if layout.student_gpus == 1:
        return 0.0
    if layout.trainer == "verl" or work.config.optim.shard:
        return passes * gathered_bytes(work.student, recompute)
    return work.config.optim.mini_batches * reduced_bytes(work.student)


def _distributions(work: Workload, layout: Layout, rates: Rates, lengths: list[int], scale: float) -> float:
    """Seconds that an objective over whole distributions adds to the update of the local trainer."""
    if layout.trainer == "verl" or not work.config.method.made.needs_teacher_distribution:
        return 0.0
    again, count = work.teacher_reads_again(layout.student_gpus), max(1, len(work.scoring))
    return sum(
        scale
        / count
        * distribution_flops(teacher, work.prompt + length, length, again=again)
        / (layout.student_gpus * layout.gpu.flops * rates.training(teacher))
        for teacher in work.scoring.values()
        for length in lengths
    )


def _others(work: Workload, layout: Layout, rates: Rates) -> float:
    """Seconds in which the teacher writes (`rollout.mix`), with this package's sampler; answers of a data set cost nothing."""
    if not work.others or work.config.rollout.mix.source != "teacher" or not work.scoring:
        return 0.0
    teacher = next(iter(work.scoring.values()))
    mine = -(-work.others // layout.student_gpus)
    how = {"shards": 1, "prompt": work.prompt, "most_rows": mine, "number_bytes": work.teacher_bytes}
    return decode_seconds(teacher, layout.gpu, known.own_sampler(rates), lengths=work.others_lengths(mine), **how)


def _has_engine(work: Workload, layout: Layout) -> bool:
    """Whether rollouts are written by another engine than the trainer's own sampler."""
    return layout.trainer == "verl" or work.writer != "sampler"


def _rollout(work: Workload, layout: Layout, rates: Rates) -> tuple[float, int, Limit]:
    """Seconds, rows under way, and what holds it up."""
    if layout.trainer == "local" and work.writer == "elsewhere":
        return 0.0, 0, ""  # somebody else's GPU, which the plan does not know
    engine = _has_engine(work, layout)
    if not engine:
        rates = known.own_sampler(rates)
    student, gpu, shards = work.student, layout.gpu, layout.rollout_shards
    mine = -(-work.own // layout.engines)
    lengths = work.lengths(mine, everyone=work.rollouts)
    room = int(layout.cache_tokens // (work.prompt + work.written))
    rows = max(1, min(room, mine, MOST_ROWS if engine else mine))
    size = work.writing_bytes(layout.trainer)
    how = {"shards": shards, "prompt": work.prompt, "most_rows": rows, "number_bytes": size}
    seconds = decode_seconds(student, gpu, rates, lengths=lengths, **how)
    reading = mine * forward_flops(student, work.prompt, 1) / (shards * gpu.flops * rates.scoring(student))
    alone = max(lengths) * step_seconds(student, gpu, rates, shards, 1, work.prompt + max(lengths) / 2, size)
    limit: Limit = "tail" if alone > 0.5 * seconds else "cache" if room < mine and rows == room else "bandwidth"
    return seconds + reading, rows, limit


def _looking(work: Workload, layout: Layout, rates: Rates, rows: int) -> float:
    """Least seconds of a teacher that follows answers: at every look it reads its weights, however few tokens there are."""
    horizon = work.config.rollout.horizon.made
    assert isinstance(horizon, Drift)  # it stops answers while they are written
    looks, end, longest = 0.0, 0, max(work.lengths(SAMPLE))
    while end < longest:
        end = horizon.next_look(end)
        looks += 1
    together = looks * max(1.0, work.own * work.written / (layout.student_gpus * max(1, rows) * longest))
    models = work.scoring.values()
    reading = sum(model.count.total * work.teacher_bytes for model in models) / (layout.gpu.bandwidth * rates.decode_bandwidth)
    return together * (reading + sum(model.layers for model in models) * rates.launch_seconds)


def _teachers(work: Workload, layout: Layout, rates: Rates, lengths: list[int], scale: float, rows: int) -> tuple[float, float]:
    """Seconds of all scores, and of those of the longest answer, which comes last. Teachers share the prompts evenly."""
    if not work.scoring or (layout.trainer == "local" and not work.scoring_share(gpus=1)):
        return 0.0, 0.0
    count, gpu = len(work.scoring), layout.gpu
    shares = [scale / count * all_flops(teacher, work.prompt, lengths) for teacher in work.scoring.values()]
    if layout.trainer == "local":  # transformers, as in training, one after the other
        rated = zip(shares, work.scoring.values(), strict=True)
        seconds = sum(flops / (layout.student_gpus * gpu.flops * rates.training(teacher)) for flops, teacher in rated)
        if work.follows:
            seconds = max(seconds, _looking(work, layout, rates, rows))
        return seconds, seconds
    longest, work_seconds, last = max(lengths), 0.0, 0.0
    for flops, teacher in zip(shares, work.teachers.values(), strict=True):  # side by side, each on GPUs of its own
        rate = layout.teacher_shards * gpu.flops * rates.scoring(teacher)
        work_seconds = max(work_seconds, flops / (layout.teacher_copies * rate))
        last = max(last, forward_flops(teacher, work.prompt + longest, longest) / rate)
    return work_seconds, last


def split_settings(plan: Plan) -> list[str]:
    """Settings that the layout needs where they are not what the recipe has."""
    layout, settings = plan.layout, plan.work.config.cluster
    wanted = {
        "cluster.teacher_gpus": (settings.teacher_gpus, layout.teacher_gpus),
        "cluster.teacher_tensor_parallel": (settings.teacher_tensor_parallel, layout.teacher_shards),
        "engine.vllm.tensor_parallel": (plan.work.vllm.tensor_parallel, layout.rollout_shards),
    }
    return [f"--{name} {new}" for name, (old, new) in wanted.items() if old != new and layout.trainer == "verl"]
