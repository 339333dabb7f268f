"""Works out the golden cases with exact rational arithmetic (and 50-digit decimals for exponentials), token by token.

    python tests/golden/make_cases.py > tests/golden/cases.json

Nothing here imports torch or the package: this is a second, slow opinion, written from the formulas of docs/method.md
with the plainest loops, so that both can only be wrong in the same way if the formulas are.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal, getcontext
from fractions import Fraction
from typing import Any

getcontext().prec = 50

GAPS: dict[str, list[list[str]]] = {
    "three rollouts": [["-1", "0.5", "-2", "0.25", "-0.25"], ["-3", "1", "-1"], ["2"]],
    "no gap at all": [["0", "0", "0"]],
    "gap on the last token only": [["0", "0", "-4"]],
    "signed sum is zero": [["1", "-1", "5"], ["-2", "1", "-1", "0.5"]],
    "one token, large gap": [["-10000"]],
    "large gaps": [["-10000", "3", "-9000", "1"]],
    "rebound": [["-1", "-1", "3", "-2", "-1", "0.5", "-0.5"]],
    "ten tokens": [["-0.1"] * 10, ["0.3", "-0.7"] * 5],
}


def share(gaps: list[Fraction], t: int, total: str) -> Fraction:
    """`sum_{k<t} gaps[k] / sum_{k<T or k<=T} gaps[k]`, t from 0; 0 where the denominator is."""
    whole = sum(gaps[:-1] if total == "paper" else gaps, Fraction(0))
    return sum(gaps[:t], Fraction(0)) / whole if whole else Fraction(0)


def cumulative_share(batch: list[list[Fraction]], gamma: Fraction, total: str, blend: bool) -> list[list[Fraction]]:
    rows = []
    for gaps in batch:
        left = [1 - share([abs(g) for g in gaps], t, total) for t in range(len(gaps))]
        rows.append([1 + gamma * value if blend else value for value in left])
    return rows


def signed(batch: list[list[Fraction]], gamma: Fraction, total: str) -> list[list[Fraction]]:
    return [
        [1 + gamma * min(Fraction(1), max(Fraction(0), 1 - share(gaps, t, total))) for t in range(len(gaps))] for gaps in batch
    ]


def ideal(batch: list[list[Fraction]], alpha: Fraction, gamma: Fraction | None) -> list[list[Decimal]]:
    def power(gaps: list[Fraction], t: int) -> Decimal:
        exponent = alpha * sum(gaps[:t], Fraction(0))
        return (Decimal(exponent.numerator) / Decimal(exponent.denominator)).exp()

    rows = []
    for gaps in batch:
        row = []
        for t in range(len(gaps)):
            reaching = [power(other, t) for other in batch if len(other) > t]
            weight = power(gaps, t) / (sum(reaching, Decimal(0)) / len(reaching))
            row.append(weight if gamma is None else 1 + Decimal(gamma.numerator) / Decimal(gamma.denominator) * weight)
        rows.append(row)
    return rows


def region(batch: list[list[Fraction]], ratio: Fraction, inside: Fraction, outside: Fraction, end: str) -> list[list[Fraction]]:
    rows = []
    for gaps in batch:
        count = math.ceil(ratio * len(gaps))
        first = [inside] * count + [outside] * (len(gaps) - count)
        rows.append(first if end == "start" else first[::-1])
    return rows


def linear_decay(batch: list[list[Fraction]], gamma: Fraction) -> list[list[Fraction]]:
    return [[1 + gamma * (1 - Fraction(t, max(1, len(gaps) - 1))) for t in range(len(gaps))] for gaps in batch]


def mean_one(rows: list[list[Fraction]]) -> list[list[Fraction]]:
    flat = [value for row in rows for value in row]
    return [[value * len(flat) / sum(flat) for value in row] for row in rows]


def weight_cases() -> list[dict[str, Any]]:
    half, three_tenths, factor = Fraction(1, 2), Fraction(3, 10), Fraction(3, 2)
    cases = []
    for name, texts in GAPS.items():
        batch = [[Fraction(g) for g in row] for row in texts]
        expected: list[tuple[str, dict[str, Any], list[list[Any]]]] = [
            ("uniform", {}, [[1] * len(row) for row in batch]),
            ("cumulative-share", {}, cumulative_share(batch, half, "paper", True)),
            ("cumulative-share", {"gamma": 4, "total": "all"}, cumulative_share(batch, Fraction(4), "all", True)),
            ("cumulative-share", {"blend": False}, cumulative_share(batch, half, "paper", False)),
            ("cumulative-share", {"normalize": "mean-one"}, mean_one(cumulative_share(batch, half, "paper", True))),
            ("signed", {}, signed(batch, half, "paper")),
            ("signed", {"gamma": 1, "total": "all"}, signed(batch, Fraction(1), "all")),
            ("ideal", {}, ideal(batch, Fraction(1, 100), None)),
            ("ideal", {"alpha": 0.1, "gamma": 0.5}, ideal(batch, Fraction(1, 10), half)),
            ("fixed-prefix", {}, region(batch, three_tenths, factor, Fraction(1), "start")),
            ("linear-decay", {"gamma": 0.5}, linear_decay(batch, half)),
            ("curriculum", {"progress": 0.0}, region(batch, three_tenths, factor, Fraction(1), "start")),
            ("curriculum", {"progress": 0.5}, region(batch, Fraction(13, 20), factor, Fraction(1), "start")),
            ("curriculum", {"progress": 1.0}, region(batch, Fraction(1), factor, Fraction(1), "start")),
            (
                "curriculum",
                {"progress": 0.5, "schedule": "linear", "start": 0.2, "end": 0.4},
                region(batch, three_tenths, factor, Fraction(1), "start"),
            ),
            ("prefix-only", {}, region(batch, three_tenths, Fraction(1), Fraction(0), "start")),
            ("suffix-only", {}, region(batch, three_tenths, Fraction(1), Fraction(0), "end")),
        ]
        for rule, params, rows in expected:
            weights = [[float(value) for value in row] for row in rows]
            cases.append(
                {
                    "name": name,
                    "gaps": [[float(g) for g in row] for row in batch],
                    "rule": rule,
                    "params": params,
                    "weights": weights,
                }
            )
    return cases


def loss_cases() -> list[dict[str, Any]]:
    """One token each: ratio, advantage, correction, and the loss and its derivative by the log-prob."""
    cases = []
    for ratio in ("0.1", "0.5", "0.79", "0.81", "1", "1.19", "1.21", "2", "2.9", "3.1", "10"):
        for advantage in ("-2", "-0.5", "0", "0.5", "2"):
            for correction in (None, "0.5", "5"):
                eta, a = Fraction(ratio), Fraction(advantage)
                clipped = min(max(eta, Fraction(4, 5)), Fraction(6, 5))
                surrogate = min(eta * a, clipped * a)
                if a < 0:
                    surrogate = max(surrogate, 3 * a)
                moves = surrogate == eta * a  # else it is constant in the ratio
                factor = Fraction(correction) if correction else Fraction(1)
                cases.append(
                    {
                        "ratio": float(eta),
                        "advantage": float(a),
                        "correction": None if correction is None else float(correction),
                        "loss": float(-surrogate * factor),
                        "derivative": float(-eta * a * factor) if moves else 0.0,
                    }
                )
    return cases


if __name__ == "__main__":
    print(json.dumps({"weights": weight_cases(), "loss": loss_cases()}, indent=None, separators=(",", ":")))
