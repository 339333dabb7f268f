"""A plan in words: will it fit, what is the bottleneck, what does it cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from iwopd.cluster.plan.estimate import Plan, split_settings
from iwopd.cluster.plan.layout import Need
from iwopd.config.own_teacher import WORDS
from iwopd.train.memory import GB, ModelShape

IDLE = 0.3
"""Share of a step below which the teacher's GPUs are worth a remark."""
LABEL = "An estimate: arithmetic and published rates (docs/plan.md). Nothing of it was run on a GPU."


def report(plan: Plan, price: float | None = None) -> str:
    """All of it, for people."""
    lines = [*_head(plan), "", *_memory(plan), ""]
    if plan.fits:
        lines += [*_time(plan), "", *_cost(plan, price), ""]
    return "\n".join([*lines, *answers(plan)])


def as_dict(plan: Plan, price: float | None = None) -> dict[str, Any]:
    """All of it, for programs. Seconds, bytes and hours; ranges as low, typical, high."""
    work, layout, typical = plan.work, plan.layout, plan.typical
    times = {"low": plan.fast, "typical": typical, "high": plan.slow}
    hours = {name: plan.hours(time) for name, time in times.items()}
    gpu_hours = {name: value * plan.gpus for name, value in hours.items()}
    return {
        "estimate": LABEL,
        "gpu": layout.gpu.name,
        "nodes": layout.nodes,
        "gpus_per_node": layout.gpus_per_node,
        "engine": layout.trainer,
        "models": {
            role: {"name": model.name, "parameters": model.count.total, "active": model.active, "shape": model.origin}
            for role, model in {"student": work.student, **work.teachers}.items()
        },
        "split": {
            "student_gpus": layout.student_gpus,
            "teacher_gpus": layout.teacher_gpus,
            "rollout_tensor_parallel": layout.rollout_shards,
            "teacher_tensor_parallel": layout.teacher_shards,
            "settings": split_settings(plan),
        },
        "fits": plan.fits,
        "would_fit": list(plan.fitting),
        "memory": [
            {"who": need.who, "needed": need.needed, "available": need.available, "fits": need.verdict, "parts": need.parts}
            for need in layout.needs
        ],
        "step": {
            "rollouts": work.rollouts,
            "answers_of_others": work.others,
            "mean_prompt_tokens": work.prompt,
            "mean_response_tokens": work.written,
            "response_tokens_assumed": work.answer_assumed,
            "response_tokens": work.rollouts * work.written,
            "rows_under_way": typical.rows,
            "seconds": {name: time.total for name, time in times.items()},
            "stages": {
                one: {name: time.stages().get(one, 0.0) for name, time in times.items()} for one in plan.typical.stages()
            },
            "teacher_work_seconds": typical.teacher,
        },
        "horizon": _horizon_dict(plan),
        "steps": work.config.steps,
        "hours": hours,
        "gpu_hours": gpu_hours,
        "cost": None if price is None else {name: value * price for name, value in gpu_hours.items()},
        "answers": list(answers(plan)),
    }


def _horizon_dict(plan: Plan) -> dict[str, Any]:
    """What the horizon costs beside full rollouts; `priced` says what its lengths come from."""
    full = plan.horizon.whole
    return {
        "section": plan.work.config.rollout.horizon.model_dump(),
        "priced": plan.horizon.by,
        "words": plan.horizon.words,
        "share_of_full_seconds": plan.typical.total / plan.full.total,
        "full": {
            "rollouts": full.rollouts,
            "mean_response_tokens": full.written,
            "seconds": plan.full.total,
            "stages": plan.full.stages(),
        },
    }


def _head(plan: Plan) -> Iterator[str]:
    work, layout = plan.work, plan.layout
    yield f"{layout.nodes} x {layout.gpus_per_node} {layout.gpu.title}. {LABEL}"
    yield ""
    yield f"student   {_model(work.student)}"
    if (own := work.config.teacher).is_student:
        yield f"teacher   {WORDS[own.source]} (teacher.source = {own.source!r})"
    for name, teacher in work.teachers.items():
        yield f"{name:<9} {_model(teacher)}"
    if work.config.teacher.has_servers:
        yield "teacher   behind servers, which are not counted"
    if layout.trainer == "local":
        ranks, shard = layout.student_gpus, ", weights, gradients and moments sharded" if work.config.optim.shard else ""
        where = "one GPU" if ranks == 1 else f"{ranks} GPUs, a process on each (torchrun){shard}"
        yield f"trainer   this package's trainer on {where}, one stage after the other"
        return
    count = len(work.teachers)
    yield (
        f"trainer   verl: {layout.student_gpus} GPUs for the student ({layout.engines} rollout engines of "
        f"{layout.rollout_shards}), {layout.teacher_gpus} for {'the teacher' if count == 1 else f'{count} teachers'} "
        f"({layout.teacher_copies} copies of {layout.teacher_shards}{'' if count == 1 else ' each'})"
    )
    if settings := split_settings(plan):
        which = "the fastest split by this estimate" if plan.fits else "no split fits; this is the nearest"
        yield f"          {which}: {' '.join(settings)}"


def _model(model: ModelShape) -> str:
    sizes = f"{_count(model.count.total)} parameters"
    if model.count.experts:
        sizes += f", {_count(model.active)} of them active"
    return f"{model.name}: {sizes} ({model.origin})"


def _memory(plan: Plan) -> Iterator[str]:
    yield f"{'memory of one GPU, GB':<24}{'needed':>8}{'there is':>10}  fits"
    for need in plan.layout.needs:
        yield f"  {need.who:<22}{need.needed / GB:>8.1f}{need.available / GB:>10.1f}  {need.verdict:<6}{_parts(need)}"


def _parts(need: Need) -> str:
    shown = [f"{name} {size / GB:.1f}" for name, size in need.parts.items() if size >= 0.05 * GB]
    return f"({', '.join(shown)})" if shown else ""


def _time(plan: Plan) -> Iterator[str]:
    work, typical = plan.work, plan.typical
    about = "assumed, set --response-tokens" if work.answer_assumed else "measured" if work.quantiles else "given"
    most = work.longest_answer if work.limit is None else work.limit
    yield (
        f"step      {work.rollouts} rollouts, mean answer {work.written:.0f} of at most {most} tokens ({about}), "
        f"mean prompt {work.prompt} (assumed): {_count(work.rollouts * work.written)} answer tokens"
    )
    if work.others:
        author = "the teacher writes" if work.config.rollout.mix.source == "teacher" else "the data set brings"
        yield (
            f"mix       of a step's {work.config.rollout.prompts_per_step} prompts {author} the answers to {work.others} "
            "(mean over training; as long as the student's, an assumption)"
        )
    if plan.horizon.words:
        yield f"horizon   {work.config.rollout.horizon.type}: {plan.horizon.words}"
    yield f"{'stage':<24}{'seconds':>8}  {'low - high':<17}{'share':>6}"
    for name, seconds in typical.stages().items():
        low, high = plan.fast.stages().get(name, 0.0), plan.slow.stages().get(name, 0.0)
        remark = ""
        if name == "teacher" and plan.layout.trainer == "verl":
            remark = f"   waited for; {_seconds(typical.teacher)} s of work run beside the rollouts"
        yield f"  {name:<22}{_seconds(seconds):>8}  {_range(low, high):<17}{100 * seconds / typical.total:>5.0f}%{remark}"
    yield f"  {'step':<22}{_seconds(typical.total):>8}  {_range(plan.fast.total, plan.slow.total):<17}"
    if plan.horizon.by in ("limit", "probe"):
        stages = ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in plan.full.stages().items())
        share = typical.total / plan.full.total
        yield f"  {'full rollouts':<22}{_seconds(plan.full.total):>8}  ({stages}); with the horizon {share:.2f} of it"


def _cost(plan: Plan, price: float | None) -> Iterator[str]:
    low, middle, high = (plan.hours(time) for time in (plan.fast, plan.typical, plan.slow))
    yield (
        f"{plan.work.config.steps} steps: {_hours(middle)} ({_hours(low)} - {_hours(high)}), "
        f"{_figure(middle * plan.gpus)} GPU-hours ({_figure(low * plan.gpus)} - {_figure(high * plan.gpus)})"
    )
    if price is not None:
        costs = [value * plan.gpus * price for value in (low, middle, high)]
        yield f"at {price:g} a GPU-hour: {_figure(costs[1])} ({_figure(costs[0])} - {_figure(costs[2])})"
    yield "Not counted: start-up, evaluations, checkpoints, failures."


def answers(plan: Plan) -> Iterator[str]:
    """Will it fit, and what is the bottleneck."""
    yield _fit_words(plan)
    if plan.fits:
        yield f"{_bottleneck_words(plan)}."
    if plan.fits and plan.work.compute_bytes == 4:
        yield "It computes in float32, which takes longer than this estimate says: set precision = 'bf16'."
    if plan.fits and plan.layout.trainer == "verl" and (busy := plan.typical.teacher / plan.typical.total) < IDLE:
        yield (
            f"The teacher's {plan.layout.teacher_gpus} GPUs work {100 * busy:.0f} % of the time; fewer would do, if the others "
            f"divide the {plan.work.rows_per_update} rollouts of an update."
        )


def _fit_words(plan: Plan) -> str:
    wrong = [need for need in plan.layout.needs if need.verdict == "no"]
    tight = [need for need in plan.layout.needs if need.verdict == "tight"]
    if wrong:
        what = "; ".join(
            f"{need.who}: {need.needed / GB:.1f} GB needed, {need.available / GB:.1f} GB there. To change it: {need.remedy}"
            for need in wrong
        )
        others = f". By this estimate it fits with {' or with '.join(plan.fitting)}" if plan.fitting else ""
        return f"Will it fit? No. {what}{others}."
    if tight:
        names = ", ".join(f"{need.who} ({need.needed / GB:.1f} of {need.available / GB:.1f} GB)" for need in tight)
        return f"Will it fit? It is tight: {names}, before slack of 5-15 %. To be at ease: {tight[0].remedy}."
    return "Will it fit? Yes, with room for what the arithmetic leaves out."


def _bottleneck_words(plan: Plan) -> str:
    time, work, layout = plan.typical, plan.work, plan.layout
    stages = time.stages()
    name = max(stages, key=lambda stage: stages[stage])
    share = f"What is the bottleneck? {name.capitalize()}: {100 * stages[name] / time.total:.0f} % of the step. "
    if name == "rollout":
        engine = layout.trainer == "verl" or work.writer == "engine"
        share_now, possible = work.vllm.memory_share, int(20 * layout.largest_share) / 20
        more = "set a lower rollout.max_tokens" if engine else "put the teacher elsewhere, or train an adapter"
        if engine and possible > share_now:
            more = f"raise engine.vllm.memory_share from {share_now:g} (up to {possible:g} fits)"
        return share + {
            "tail": "Most of it, the longest answers are written almost alone, and each token waits for the one before: more "
            "GPUs hardly help. A lower rollout.max_tokens does, and more rollouts per step cost little",
            "cache": f"The cache holds {time.rows} of an engine's {-(-work.rollouts // layout.engines)} answers at a time: "
            f"{more}, or use more GPUs for the student",
            "bandwidth": "Each decoded token reads the weights and the caches: faster memory or more GPUs for the student help",
        }.get(time.rollout_limit, "")
    if name == "teacher":
        if work.config.teacher.is_student:
            return share + "The student reads every answer a second time, with the teacher's prompt: a shorter one helps"
        if layout.trainer == "local":
            return share + "Put the teacher behind a server with a GPU of its own, where it works while the student writes"
        return share + "The student waits for the scores: give the teacher more GPUs (cluster.teacher_gpus)"
    if name == "update" and time.update_limit == "network":
        return f"{share}FSDP sends weights and gradients for longer than is computed: raise optim.token_budget (fewer passes)"
    if name in ("update", "old log-probs", "reference"):
        slow = ". Experts without expert parallelism reach little of a GPU" if work.student.count.experts else ""
        return share + f"It is computing: more GPUs for the student help{slow}"
    return share + "The step is so small that the overhead of a step counts: make it larger (rollout.prompts_per_step)"


def _count(number: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:.0f}"


def _seconds(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def _range(low: float, high: float) -> str:
    return f"{_seconds(low)} - {_seconds(high)}"


def _hours(hours: float) -> str:
    return f"{hours:.0f} h" if hours >= 10 else f"{hours:.1f} h" if hours >= 0.1 else f"{3600 * hours:.0f} s"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
