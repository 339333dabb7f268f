"""What spans of several tokens cost, all else equal.

    python bench/spans.py                                      # gradient noise by length of spans; minutes with one thread
    python bench/spans.py --train runs/spans --lineages 8 9    # training with the spans of another tokenizer

The teacher of the embedded world has the student's tokenizer. Its log-probs of several tokens in a row are added up into one
span, as those of a teacher with another tokenizer are, so nothing differs but the spans. Without --train: noise over signal of
OPD's gradient (`iwopd.analysis.gradient_noise`) of the untrained student. With it: OPD with the spans that the tokenizer
`pieces` of the embedded worlds makes; the runs to compare it with are those of `iwopd reproduce tokenizers`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from iwopd import tiny
from iwopd.algo.spans import UNSCORED
from iwopd.algo.views import NOTHING, TokenScores, Wanted
from iwopd.analysis.gradient_noise import gradient_noise
from iwopd.analysis.reproduce.runs import Runs
from iwopd.analysis.reproduce.variants import OPD
from iwopd.config import make_config
from iwopd.teacher.foreign import Reader
from iwopd.teacher.scorer import Scorer
from iwopd.train.run import run_training
from iwopd.train.teachers import build_teacher
from iwopd.types import Rollout

Cut = Callable[[Rollout], Tensor]
"""The span [T] of each token of a rollout."""


class Coarse(Scorer):
    """Another scorer's log-probs, span by span."""

    def __init__(self, cut: Cut, scorer: Scorer) -> None:
        self.cut, self.scorer, self.here = cut, scorer, scorer.here

    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        return [one.logprobs for one in self.look(rollouts)]

    def look(
        self, rollouts: Sequence[Rollout], wanted: Wanted = NOTHING, chosen: Sequence[Tensor] | None = None
    ) -> list[TokenScores]:
        found = self.scorer.score(rollouts)
        return [_together(scores.clamp(min=-100), self.cut(one)) for scores, one in zip(found, rollouts, strict=True)]


def _together(scores: Tensor, spans: Tensor) -> TokenScores:
    """A span's sum on its last token, 0 elsewhere."""
    sums = torch.zeros(int(spans.max()) + 2, dtype=scores.dtype).scatter_add_(0, spans + 1, scores)  # 0: in no span
    last = torch.cat([spans[1:] != spans[:-1], torch.ones(1, dtype=torch.bool)]) & (spans != UNSCORED)
    return TokenScores(torch.where(last, sums[spans + 1], 0.0), spans=spans)


def every(size: int) -> Cut:
    return lambda rollout: torch.arange(len(rollout)) // size


def as_pieces() -> Cut:
    reader = Reader(tiny.build_tokenizer(), tiny.build_tokenizer("pieces"), lambda prompt: prompt)
    return lambda rollout: torch.tensor(reader.read(rollout)[1].student, dtype=torch.long)


def noise(options: argparse.Namespace) -> None:
    print("| tokens a span | noise / signal, by lineage |\n| --- | --- |", flush=True)
    cuts = {str(size) if size < 1000 else "the whole answer": every(size) for size in options.sizes}
    for name, cut in ({"as `pieces` cuts": as_pieces()} | cuts).items():
        cells = []
        for lineage in options.lineages:
            config = make_config({"models": {"world": options.world, "lineage": lineage}, "threads": 1, "optim": {"lr": 1e-4}})
            cells.append(f"{gradient_noise(config, options.batches, teacher=partial(Coarse, cut)).ratio:.2f}")
        print(f"| {name} | {' '.join(cells)} |", flush=True)


def train(options: argparse.Namespace) -> None:
    """Runs that differ from those of `iwopd reproduce` in the spans alone; started again, it leaves out what is there."""

    def coarse(*values: Any, **more: Any) -> Scorer:
        return Coarse(as_pieces(), build_teacher(*values, **more))

    for lineage in options.lineages:
        folder = options.train / f"{options.world}-{lineage}-{options.seed}"
        if not (folder / "evals.jsonl").exists():
            with patch("iwopd.train.assembly.build_teacher", coarse):
                run_training(Runs(options.train, world=options.world).config(OPD, lineage, options.seed), folder, doctor=False)
        found = [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]
        print(f"lineage {lineage}:", *(f"step {one['step']} {100 * one['mean']:.1f}" for one in found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", default="clean")
    parser.add_argument("--lineages", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 3, 4, 8, 16, 1000])
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--train", type=Path, help="train instead, with the spans of `pieces`, in this folder")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    (train if options.train else noise)(options)


if __name__ == "__main__":
    main()
