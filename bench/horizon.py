"""Do seconds follow tokens? A whole step with answers that stop half-way against one with whole answers.

    python bench/horizon.py [--rounds 3] [--threads N] [--cpu-time] [--json FILE]

The models and lengths of `bench/step.py`, "2k 16x512": 16 answers under way at a time and others waiting, lengths from a
quarter of 512 tokens to all of them. In the second case a teacher follows the answers block by block, and each one stops at a
position that was fixed before, so that half of the tokens are left. Everything else is what training does: writing, following,
the teacher's scores, old log-probs, weights, the update. Positions are scripted because random models have no drift to find.

Exit code 1 if the step with stops takes more than 0.65 of the other's time, teacher included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from step import PROMPT_TOKENS, make_model

ROWS, WAITING, LONGEST, VOCABULARY = 16, 32, 512, 2048
BAR = 0.65
BLOCK = 8


def lengths_of(count: int) -> list[int]:
    """Evenly spread from a quarter of the longest to all of it, long ones among short ones."""
    low = LONGEST // 4
    spread = [low + (LONGEST - low) * row // (count - 1) for row in range(count)]
    return [spread[(row * 17) % count] for row in range(count)]


def nearest_look(position: float) -> int:
    """The position at which answers are looked at that is nearest to this one."""
    from iwopd.algo.horizons import next_look

    looks = [next_look(0, BLOCK)]
    while looks[-1] < LONGEST:
        looks.append(next_look(looks[-1], BLOCK))
    return min(looks, key=lambda look: abs(look - position))


def parts() -> dict[str, Any]:
    from iwopd.algo.objectives import make_objective
    from iwopd.config import Optim
    from iwopd.lm import ResponseModel
    from iwopd.teacher.local import LocalScorer
    from iwopd.train.learner import Learner
    from iwopd.train.ranks import Ranks

    student, teacher = make_model(256, 4, VOCABULARY), make_model(512, 6, VOCABULARY)
    objective = make_objective({"weights": "cumulative-share"})
    learner = Learner(ResponseModel(student), Optim(), objective, Ranks())
    made = {"student": student, "old": LocalScorer(student), "learner": learner, "objective": objective}
    return {**made, "teacher": LocalScorer(teacher.eval())}


def one_step(made: dict[str, Any], number: int, *, stops: Sequence[int] | None, clock: Any) -> dict[str, float]:
    """Seconds of a step by stage; `stops`: where each answer stops, None: whole answers."""
    import torch

    from iwopd.rollout.horizons import Drift
    from iwopd.rollout.local import LocalSampler
    from iwopd.rollout.sampling import SamplingSettings
    from iwopd.train.scoring import evidence_of, loss_columns
    from iwopd.train.watching import Watching
    from iwopd.types import Prompt, ScoredRollout, TokenBatch

    class Scripted(Watching):
        """Stops every answer at its position, whatever the teacher says; the teacher scores all the same."""

        def _low(self, rows: Sequence[int]) -> list[bool]:
            assert stops is not None
            return [sum(map(len, self._gaps[row])) >= stops[row] for row in rows]

    lengths = lengths_of(WAITING + ROWS)
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(6, VOCABULARY, (len(lengths), PROMPT_TOKENS), generator=generator).tolist()
    prompts = [Prompt(f"{number}/{row}", tuple(own)) for row, own in enumerate(ids)]
    sampler = LocalSampler(made["student"], SamplingSettings(LONGEST), cache_tokens=ROWS * (LONGEST + PROMPT_TOKENS + 68))
    start = clock()
    watching = None if stops is None else Scripted(Drift(block=BLOCK), made["teacher"].follow())
    rollouts = sampler.sample(prompts, seed=0, step=number, max_tokens=lengths, watcher=watching)
    written = clock()
    scores = made["teacher"].look(rollouts) if watching is None else watching.scores()
    scored = clock()
    forward = made["learner"].forward(rollouts)
    old = made["old"].look(rollouts) if forward is None else forward.scores
    items = zip(rollouts, old, scores, strict=True)
    batch = TokenBatch.collate([ScoredRollout(one, own.logprobs, theirs.logprobs) for one, own, theirs in items])
    columns = loss_columns(made["objective"], batch, evidence_of(batch))
    made["learner"].update(batch, columns, seed=0, step=number, forward=forward)
    end = clock()
    return {
        "write": written - start,
        "teacher": scored - written,
        "update": end - scored,
        "step": end - start,
        "tokens": float(sum(map(len, rollouts))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="steps of each kind, in turn, after one of each to warm up")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cpu-time", action="store_true", help="compare CPU seconds, at one thread")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    import torch

    clock = time.process_time if options.cpu_time else time.perf_counter
    torch.set_num_threads(1 if options.cpu_time else options.threads)
    made = parts()
    halves = [nearest_look(length / 2) for length in lengths_of(WAITING + ROWS)]
    kinds: dict[str, list[int] | None] = {"whole answers": None, "half of the tokens": halves}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for number in range(options.rounds + 1):
        for name, stops in kinds.items():
            found[name].append(one_step(made, number, stops=stops, clock=clock))
            print(f"{name}: {found[name][-1]['step']:.2f} s", file=sys.stderr, flush=True)
    medians = {
        name: {stage: statistics.median(one[stage] for one in steps[1:]) for stage in steps[0]} for name, steps in found.items()
    }
    print("| | write s | teacher s | update s | step s | tokens |\n| --- | --- | --- | --- | --- | --- |")
    for name, row in medians.items():
        seconds = " | ".join(f"{row[stage]:.2f}" for stage in ("write", "teacher", "update", "step"))
        print(f"| {name} | {seconds} | {row['tokens']:.0f} |")
    whole, half = medians.values()
    ratio, tokens = half["step"] / whole["step"], half["tokens"] / whole["tokens"]
    print(f"\n{'ok  ' if ratio <= BAR else 'MISS'} time of the step: {ratio:.3f} at {tokens:.3f} of the tokens (bar <= {BAR})")
    if options.json:
        options.json.write_text(json.dumps({"medians": medians, "ratio": ratio, "tokens": tokens}, indent=1) + "\n")
    sys.exit(0 if ratio <= BAR else 1)


if __name__ == "__main__":
    main()
