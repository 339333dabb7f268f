"""Works out golden divergences with 50-digit decimals, outcome by outcome, and their derivatives by differences.

    python tests/golden/make_divergences.py > tests/golden/divergences.json

Nothing here imports torch or the package: see `make_cases.py`.
"""

from __future__ import annotations

import json
from decimal import Decimal, getcontext
from typing import Any

getcontext().prec = 50
STEP = Decimal(10) ** -18

LOGITS = {
    "near": (["0.5", "-1", "0.25", "0", "2"], ["0.6", "-1.1", "0.25", "0.1", "1.9"]),
    "far": (["3", "0", "-2", "0.5", "-4"], ["-3", "1", "4", "0", "0.25"]),
    "sure": (["30", "-5", "0", "1", "2"], ["1", "0.5", "0", "-0.5", "-1"]),
}
KINDS: list[tuple[str, str | None]] = [
    ("reverse-kl", None),
    ("forward-kl", None),
    ("jsd", "0"),
    ("jsd", "0.1"),
    ("jsd", "0.5"),
    ("jsd", "1"),
    ("skew-reverse-kl", "0.1"),
    ("skew-reverse-kl", "0.9"),
    ("skew-forward-kl", "0.1"),
    ("skew-forward-kl", "0.9"),
]
Numbers = list[Decimal]


def softmax(logits: Numbers) -> Numbers:
    scaled = [value.exp() for value in logits]
    return [value / sum(scaled) for value in scaled]


def kl(one: Numbers, other: Numbers) -> Decimal:
    return sum((a * (a.ln() - b.ln()) for a, b in zip(one, other, strict=True)), Decimal(0))


def mixed(one: Numbers, other: Numbers, share: Decimal) -> Numbers:
    return [share * a + (1 - share) * b for a, b in zip(one, other, strict=True)]


def divergence(name: str, mix: str | None, p: Numbers, q: Numbers) -> Decimal:
    share = Decimal(mix or 0)
    if name == "reverse-kl" or (name == "jsd" and share == 1):
        return kl(p, q)
    if name == "forward-kl" or (name == "jsd" and share == 0):
        return kl(q, p)
    if name == "jsd":
        m = mixed(q, p, share)
        return share * kl(q, m) + (1 - share) * kl(p, m)
    return kl(p, mixed(p, q, share)) if name == "skew-reverse-kl" else kl(q, mixed(q, p, share))


def merged(probabilities: Numbers, ids: list[int]) -> Numbers:
    """Those of the ids, and last that of all others together."""
    others = [value for i, value in enumerate(probabilities) if i not in ids]
    return [probabilities[i] for i in ids] + ([sum(others, Decimal(0))] if others else [])


def case(name: str, mix: str | None, logits: Numbers, teacher: Numbers, ids: list[int]) -> tuple[Decimal, Numbers]:
    """The divergence over the ids and the rest, and its derivative by each of the student's logits."""
    q = merged(softmax(teacher), ids)

    def value(changed: Numbers) -> Decimal:
        return divergence(name, mix, merged(softmax(changed), ids), q)

    slopes = []
    for i in range(len(logits)):
        up, down = ([v + sign * STEP if j == i else v for j, v in enumerate(logits)] for sign in (1, -1))
        slopes.append((value(up) - value(down)) / (2 * STEP))
    return value(logits), slopes


def cases() -> list[dict[str, Any]]:
    made = []
    for pair, texts in LOGITS.items():
        logits, teacher = ([Decimal(text) for text in side] for side in texts)
        for name, mix in KINDS:
            for ids in ([0, 1, 2, 3, 4], [3, 0], [1]):
                value, slopes = case(name, mix, logits, teacher, ids)
                made.append(
                    {
                        "pair": pair,
                        "logits": [float(x) for x in logits],
                        "teacher": [float(x) for x in teacher],
                        "divergence": name,
                        "mix": None if mix is None else float(mix),
                        "ids": ids,
                        "value": float(value),
                        "slopes": [float(slope) for slope in slopes],
                    }
                )
    return made


if __name__ == "__main__":
    print(json.dumps(cases(), indent=None, separators=(",", ":")))
