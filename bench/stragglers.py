"""What limits 1,000 GPUs: rollouts that wait for the longest answer, and what a drift-stopped horizon saves of that.

    python bench/stragglers.py [--worlds clean] [--seed 0]   # the tables of docs/plan.md, "The paper's runs" and "1,000 GPUs"

A simulation on paper: the decoding times are those of `iwopd plan` (typical rates, nothing of it was run on a GPU), the lengths
of answers were measured by others (`LENGTHS`), and where answers drift is measured here, on rollouts of the embedded worlds'
students under their teachers. Those answers are short and nearly alike in length, so they cannot say how drifts of long
answers are spread. Both extremes are shown:

    share   an answer keeps the share of its length that some answer of the world keeps, long or short
    rate    every token drifts with the same probability, so that the mean share is the same: long answers drift more surely

`verl` refuses `drift` today (docs/cluster.md): the table says what it would be worth.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise

from iwopd.cluster.plan.gpus import GPUS
from iwopd.cluster.plan.public_models import public_config
from iwopd.cluster.plan.rates import TYPICAL
from iwopd.cluster.plan.rollouts import decode_seconds
from iwopd.train.memory import ModelShape

LEVELS = (*(place / 20 for place in range(20)), 0.99, 0.999, 1.0)
LENGTHS: dict[str, tuple[int, ...]] = {
    "reasoning": (
        *(812, 2234, 3018, 3724, 4319, 4937, 5564, 6107, 6659, 7236, 7698, 8182, 8689, 9236, 9875, 10609, 11475, 12423, 13583),
        *(15272, 20976, 26390, 32768),
    ),
    "chat": (
        *(2, 25, 48, 70, 103, 151, 209, 274, 350, 439, 526, 611, 691, 774, 863, 963, 1079, 1221, 1420),
        *(1754, 2723, 4073, 4096),
    ),
}
"""Quantiles at `LEVELS` of the tokens that Qwen3-8B wrote: 1,980 answers to GPQA (at most 32,768 tokens) and 27,648 to chats
(at most 4,096). ML.ENERGY leaderboard at 0cd52da, `output_length_distribution` (source 1 of docs/plan.md), straight lines
in its bins."""
LIMIT = {"reasoning": 16384, "chat": 4096}
"""`rollout.max_tokens`: the paper's, and what the chats were cut off at."""
MODEL, PROMPT, GPU = "Qwen3-1.7B", 256, GPUS["h100"]
RECIPE = "paper/qwen3-1.7b-from-qwen3-30b-a3b-instruct-2507-iw-opd-math"
NODES = (4, 16, 64, 128)
ENGINES = (16, 64, 256, 1024)
DRAWS = 5
THRESHOLD, BLOCK = 0.05, 8
"""The drift horizon's defaults."""
Stop = Callable[[random.Random, int], int]
"""Tokens that are written of an answer of so many."""


def drawn_length(dice: random.Random, kind: str) -> int:
    level = dice.random()
    for (left, low), (right, high) in pairwise(zip(LEVELS, LENGTHS[kind], strict=True)):
        if level <= right:
            return max(1, min(LIMIT[kind], round(low + (high - low) * (level - left) / (right - left))))
    raise AssertionError("the last level is 1")


def world_shares(world: str, seed: int) -> list[float]:
    """What the drift horizon leaves of answers that the world's student writes, as shares of their lengths."""
    from iwopd.algo.horizons import cut_lengths
    from iwopd.config import make_config
    from iwopd.train.assembly import assemble
    from iwopd.train.scoring import score_step, write_rollouts

    settings = {"models": {"world": world}, "rollout": {"prompts_per_step": 256}, "seed": seed, "threads": 1}
    config = make_config(settings)
    with assemble(config, lambda _: None) as parts:
        evidence = score_step(config, parts, write_rollouts(config, parts, 1), 1).evidence
    kept = cut_lengths(evidence.gap, evidence.mask, threshold=THRESHOLD, block=BLOCK)
    return [float(share) for share in kept / evidence.mask.sum(-1)]


def by_share(shares: Sequence[float]) -> Stop:
    return lambda dice, length: max(1, math.ceil(dice.choice(shares) * length))


def by_rate(shares: Sequence[float], kind: str, seed: int) -> Stop:
    """Of the same mean share of tokens over this kind of answers."""
    dice = random.Random(f"rate:{seed}")
    lengths = [drawn_length(dice, kind) for _ in range(2000)]
    wanted = statistics.mean(shares) * sum(lengths)
    low, high = 1e-9, 1.0
    for _ in range(100):
        rate = math.sqrt(low * high)
        written = sum(-math.expm1(-rate * length) / rate for length in lengths)
        low, high = (rate, high) if written > wanted else (low, rate)
    return lambda dice, length: max(1, min(length, math.ceil(dice.expovariate(math.sqrt(low * high)))))


def at_quantile(kind: str, level: float) -> Stop:
    limit = LENGTHS[kind][LEVELS.index(level)]
    return lambda dice, length: min(length, limit)


def to_the_end(dice: random.Random, length: int) -> int:
    return length


def stage(model: ModelShape, engines: int, each: int, kind: str, stop: Stop, seed: int) -> tuple[float, float, float]:
    """Seconds until the last engine is done, share of all engines' time in which they wait, tokens: means over draws."""
    ends, idle, tokens = [], [], []
    for draw in range(DRAWS):
        dice = random.Random(f"{seed}:{draw}")
        lengths = [drawn_length(dice, kind) for _ in range(engines * each)]
        stops = random.Random(f"stops:{seed}:{draw}")
        written = [stop(stops, length) for length in lengths]
        seconds = [
            decode_seconds(model, GPU, TYPICAL, shards=1, lengths=written[first : first + each], prompt=PROMPT, most_rows=256)
            for first in range(0, len(written), each)
        ]
        ends.append(max(seconds))
        idle.append(1 - statistics.mean(seconds) / max(seconds))
        tokens.append(sum(written))
    return statistics.mean(ends), statistics.mean(idle), statistics.mean(tokens)


def scale() -> None:
    """The plan's stages on more and more GPUs: the paper's step, and one that grows with them."""
    from iwopd import recipes
    from iwopd.cluster.plan import make_plan, open_workload
    from iwopd.config import load_config

    print(f"`iwopd plan {RECIPE} --response-tokens 8000`, H100: seconds of a step's stages, typical\n")
    print(
        "| GPUs | rollouts | rollout | teacher | old log-probs | update | weight sync, other | step | bottleneck of rollouts |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for nodes in NODES:
        for prompts in dict.fromkeys((1024, 32 * 8 * nodes)):
            config = load_config(recipes.find(RECIPE), {"rollout.prompts_per_step": prompts})
            plan = make_plan(open_workload(config, 8000), GPU, nodes, 8)
            time, layout = plan.typical, plan.layout
            parts = [
                time.rollout,
                time.teacher_waited,
                time.old_logprobs,
                time.update,
                time.weight_sync + time.other,
                time.total,
            ]
            split = f"{layout.student_gpus} + {layout.teacher_gpus}"
            print(
                f"| {split} | {prompts:,} | {' | '.join(f'{seconds:.1f}' for seconds in parts)} | {time.rollout_limit} |",
                flush=True,
            )
    print()


def papers() -> None:
    """The plan of the paper's runs on its 32 GPUs, whose kind it does not name."""
    from iwopd import recipes
    from iwopd.cluster.plan import make_plan, open_workload
    from iwopd.config import load_config

    print("| run | GPUs (student + teacher) | H100: step, s | all steps, h | A100 80 GB: step, s | all steps, h | published |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for recipe in sorted(name for name in recipes.names() if name.startswith("paper/") and name.endswith("-iw-opd-math")):
        work = open_workload(load_config(recipes.find(recipe)))
        plans = [make_plan(work, GPUS[name], 4, 8) for name in ("h100", "a100-80")]
        cells = []
        for plan in plans:
            times = [plan.typical, plan.fast, plan.slow]
            for unit in ([time.total for time in times], [plan.hours(time) for time in times]):
                middle, low, high = (f"{value:,.0f}" if value >= 10 else f"{value:.1f}" for value in unit)
                cells.append(f"{middle} ({low} - {high})")
        layout = plans[0].layout
        name = recipe.removeprefix("paper/").removesuffix("-iw-opd-math")
        print(f"| `{name}` | {layout.student_gpus} + {layout.teacher_gpus} | {' | '.join(cells)} | nothing |", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worlds", nargs="+", default=["clean"], choices=["clean", "drift"])
    options = parser.parse_args()
    seed: int = options.seed
    papers()
    scale()
    model = ModelShape.of(public_config(MODEL))
    shares = {world: world_shares(world, seed) for world in options.worlds}
    print(f"Where the drift horizon (threshold {THRESHOLD:g}, blocks of {BLOCK}) stops the students' answers before training\n")
    print("| world | answers | mean share written | not stopped |\n| --- | --- | --- | --- |")
    for world, found in shares.items():
        whole = sum(share >= 1 for share in found) / len(found)
        print(f"| `{world}` | {len(found)} | {statistics.mean(found):.2f} | {whole:.0%} |")
    for kind in LENGTHS:
        horizons: dict[str, Stop] = {"full": to_the_end, "fixed at the 90 % quantile": at_quantile(kind, 0.9)}
        for world, found in shares.items():
            horizons[f"drift as in `{world}`, share"] = by_share(found)
            horizons[f"drift as in `{world}`, rate"] = by_rate(found, kind, seed)
        _table(model, kind, horizons, seed)


def _table(model: ModelShape, kind: str, horizons: dict[str, Stop], seed: int) -> None:
    print(f"\n{kind}: answers of at most {LIMIT[kind]:,} tokens, {MODEL} on H100, one engine a GPU; seconds (waiting)\n")
    columns = [f"{engines} engines x 16" for engines in ENGINES] + [f"1,024 answers, {engines}" for engines in ENGINES[1:]]
    print(f"| horizon | tokens | {' | '.join(columns)} |\n| --- | --- |{' --- |' * len(columns)}")
    full_tokens = 0.0
    for name, stop in horizons.items():
        cells = [stage(model, engines, 16, kind, stop, seed) for engines in ENGINES]
        cells += [stage(model, engines, 1024 // engines, kind, stop, seed) for engines in ENGINES[1:]]
        full_tokens = full_tokens or cells[-1][2]
        shown = " | ".join(f"{seconds:.1f} ({idle:.0%})" for seconds, idle, _ in cells)
        print(f"| {name} | {cells[-1][2] / full_tokens:.2f} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
