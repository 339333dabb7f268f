"""What spans of several tokens cost: gradient noise when a teacher scores k tokens at a time instead of each.

    python bench/spans.py                     # minutes with one thread, and the models' training the first time

The teacher of the embedded world has the student's tokenizer. Its log-probs of k tokens in a row are added up into one span, as
those of a teacher with another tokenizer would be, so nothing differs but the length of spans. Noise over signal of OPD's
gradient (`iwopd.analysis.gradient_noise`) of the untrained student, by lineage; the unit is the lineage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from iwopd.algo.views import NOTHING, TokenScores, Wanted
from iwopd.analysis.gradient_noise import gradient_noise
from iwopd.config import make_config
from iwopd.teacher.scorer import Scorer
from iwopd.types import Rollout


class Coarse(Scorer):
    """Another scorer's log-probs of every `size` tokens together."""

    def __init__(self, size: int, scorer: Scorer) -> None:
        self.size, self.scorer, self.here = size, scorer, scorer.here

    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        return [one.logprobs for one in self.look(rollouts)]

    def look(
        self, rollouts: Sequence[Rollout], wanted: Wanted = NOTHING, chosen: Sequence[Tensor] | None = None
    ) -> list[TokenScores]:
        return [self._together(scores.clamp(min=-100)) for scores in self.scorer.score(rollouts)]

    def _together(self, scores: Tensor) -> TokenScores:
        spans = torch.arange(len(scores)) // self.size
        sums = torch.zeros(int(spans[-1]) + 1, dtype=scores.dtype).scatter_add_(0, spans, scores)
        last = torch.cat([spans[1:] != spans[:-1], torch.ones(1, dtype=torch.bool)])
        return TokenScores(torch.where(last, sums[spans], 0.0), spans=spans)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", default="clean")
    parser.add_argument("--lineages", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 3, 4, 8, 16, 1000])
    parser.add_argument("--batches", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| tokens a span | noise / signal, by lineage |\n| --- | --- |", flush=True)
    for size in options.sizes:
        cells = []
        for lineage in options.lineages:
            config = make_config({"models": {"world": options.world, "lineage": lineage}, "threads": 1, "optim": {"lr": 1e-4}})
            found = gradient_noise(config, options.batches, teacher=partial(Coarse, size))
            cells.append(f"{found.ratio:.2f}")
        print(f"| {size if size < 1000 else 'the whole answer'} | {' '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
