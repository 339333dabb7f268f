"""`iwopd reproduce objectives`: every objective at three learning rates, and the noise of its gradients at equal batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from iwopd.analysis.gradient_noise import GradientNoise
from iwopd.analysis.reproduce.runs import Runs
from iwopd.analysis.reproduce.tables import Table, in_words, mean_alone, show
from iwopd.analysis.reproduce.variants import KL, KL_SURVIVAL, OPD, SURVIVAL, Variant, faster

RATES = (1.0, 2.0, 4.0)
"""Learning rates that every objective tries, as multiples of --lr."""
Noises = Mapping[int, Mapping[str, GradientNoise]]
"""By lineage and title."""


def rates_table(runs: Runs, variants: Sequence[Variant], steps: Sequence[int]) -> tuple[Table, dict[str, Any]]:
    """Accuracy of every objective at each of its learning rates and steps."""
    columns = ["objective", *(f"step {step}, lr x {rate:g}" for step in steps for rate in RATES)]
    rows, numbers = [], {}
    for variant in variants:
        cells = {(step, rate): runs.accuracy(faster(variant, rate), step) for step in steps for rate in RATES}
        rows.append([variant.title, *(mean_alone(cell) for cell in cells.values())])
        numbers[variant.title] = {f"step {step}, lr x {rate:g}": cell.mean for (step, rate), cell in cells.items()}
    return Table(columns, rows), numbers


def noise_table(noises: Noises) -> tuple[Table, dict[str, Any]]:
    """Noise over signal of a batch's gradient, lineage by lineage."""
    titles = list(next(iter(noises.values()), {}))
    rows = [[title, *(f"{noises[lineage][title].ratio:.2f}" for lineage in noises)] for title in titles]
    numbers = {title: [noises[lineage][title].ratio for lineage in noises] for title in titles}
    return Table(["gradient noise / signal", *(f"lineage {lineage}" for lineage in noises)], rows), numbers


def best(runs: Runs, variant: Variant, step: int) -> Variant:
    """At the learning rate that is best at this step, on these very runs."""
    return runs.best((faster(variant, rate) for rate in RATES), step)


def registered(runs: Runs, steps: Sequence[int]) -> list[str]:
    """The comparisons that were registered, a family: whole distributions against the sampled token, at one learning rate."""
    words = []
    for ours, theirs in ((KL, OPD), (KL_SURVIVAL, SURVIVAL)):
        for step in steps:
            effect = runs.effect(ours, theirs, step, family="registered")
            words.append(in_words(f"{ours.title} minus {theirs.title} at step {step}, same learning rate", effect))
    return words


def at_their_best(runs: Runs, variants: Sequence[Variant], step: int) -> list[str]:
    """Every objective against the first one, each at its best learning rate."""
    base = best(runs, variants[0], step)
    words = []
    for variant in variants[1:]:
        ours = best(runs, variant, step)
        effect = runs.effect(ours, base, step)
        words.append(in_words(f"Each at its best learning rate for step {step}, {ours.title} minus {base.title}", effect))
    words.append(
        f"The best of {len(RATES)} learning rates is chosen on these very runs, for every objective: a search, not a test. "
        f"Base {show(runs.accuracy(variants[0], 0))}."
    )
    return words
