"""Checks per second of the math checker, and what hanging answers cost it. Two cores or more.

    python bench/math_check.py                  # the table of docs/performance.md, about a minute and a half on two cores
    python bench/math_check.py --checks 200     # a quick look

Every check is another pair of answer and gold, made of fractions, roots, polynomials, intervals, sets and logarithms, right and
wrong ones by turns; none is of the kind that is settled without a worker. Three rounds in one process: none hangs; one of a
hundred is a tower of powers, a huge factorial or an endless sum that no computer can finish, evenly spread; and the first round
again by math-verify in this very thread (its own timeouts off), which is the work without processes, pipes and our rules.
Workers are started inside the clock. The ratio is of CPU time: on a shared machine wall time measures the neighbours.

Exit code 1 if the round with hanging answers takes longer than `--bar` seconds (180 for 1,000 checks, by the issue), or if any
outcome is not the one expected: right answers correct, wrong ones wrong, hanging ones timeout.
"""

from __future__ import annotations

import argparse
import logging
import resource
import sys
import time
from collections import Counter

from iwopd.eval.math import MathOutcome, check_math_many
from iwopd.eval.workers import usable_cores

HANGING = [r"9^{{9^{{9^{{{0}}}}}}}", r"(10^{{{0}}})!", r"\sum_{{k=1}}^{{10^{{{0}}}}}\frac{{1}}{{k}}"]


def build_pairs(count: int, hanging_share: float) -> list[tuple[str, str, str]]:
    """(answer, gold, expected status)."""
    spacing = round(1 / hanging_share) if hanging_share else 0
    pairs = []
    for i in range(count):
        n, m = i + 3, i % 2  # m = 1 makes it wrong
        if spacing and i % spacing == spacing // 2:
            pairs.append((HANGING[i // spacing % len(HANGING)].format(9 + i), "5", "timeout"))
            continue
        answer, gold = [
            (rf"\frac{{{n}}}{{{4 * n}}}+{n}", rf"\frac{{{4 * n + 1 + m}}}{{4}}"),
            (rf"\sqrt{{{n * n * 2}}}", rf"{n + m}\sqrt{{2}}"),
            (f"(x+{n})^2", f"x^2+{2 * n + m}x+{n * n}"),
            (rf"[{n}, \infty)", rf"x \ge {n + m}"),
            (rf"\{{{n}, {n + 1}, {2 * n}\}}", rf"\{{{2 * n + m}, {n}, {n + 1}\}}"),
            (rf"\ln {n * n}", rf"2\ln {n + m}"),
            (rf"x = \frac{{{n}\pi}}{{7}}", rf"\frac{{{n + m}}}{{7}}\pi"),
        ][i // 2 % 7]
        pairs.append((answer, gold, "wrong" if m else "correct"))
    return pairs


def timed(pairs: list[tuple[str, str, str]]) -> tuple[float, float, list[MathOutcome]]:
    """Wall seconds, CPU seconds of this process and its workers, outcomes."""
    started, cpu_started = time.perf_counter(), cpu_seconds()
    outcomes = check_math_many([(rf"So \boxed{{{answer}}}.", gold) for answer, gold, _ in pairs], workers=usable_cores())
    return time.perf_counter() - started, cpu_seconds() - cpu_started, outcomes


def cpu_seconds() -> float:
    """Of this process and of its children that have ended; all workers of a round have."""
    usages = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def math_verify_alone(pairs: list[tuple[str, str, str]]) -> tuple[float, float]:
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    started, cpu_started = time.perf_counter(), cpu_seconds()
    for answer, gold, _ in pairs:
        verify(parse(f"${gold}$", parsing_timeout=None), parse(f"${answer}$", parsing_timeout=None), timeout_seconds=None)
    return time.perf_counter() - started, cpu_seconds() - cpu_started


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checks", type=int, default=1000)
    parser.add_argument("--bar", type=float, default=180.0, help="seconds that the round with hanging answers may take")
    options = parser.parse_args()

    calm = build_pairs(options.checks, 0.0)
    rough = build_pairs(options.checks, 0.01)
    calm_seconds, calm_cpu, calm_outcomes = timed(calm)
    rough_seconds, rough_cpu, rough_outcomes = timed(rough)
    alone_seconds, alone_cpu = math_verify_alone(calm)

    print(f"{options.checks} checks, {usable_cores()} workers\n")
    print("| round | s | CPU s | CPU ms a check | CPU, ratio | outcomes |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, seconds, cpu, outcomes in (
        ("none hangs", calm_seconds, calm_cpu, calm_outcomes),
        ("1 % hang", rough_seconds, rough_cpu, rough_outcomes),
        ("math-verify in one thread", alone_seconds, alone_cpu, []),
    ):
        counts = ", ".join(f"{number} {status}" for status, number in sorted(Counter(o.status for o in outcomes).items()))
        each = 1000 * cpu / options.checks
        print(f"| {name} | {seconds:.1f} | {cpu:.1f} | {each:.0f} | {cpu / alone_cpu:.2f} | {counts} |")

    surprises = [
        f"{answer} vs {gold}: expected {expected}, got {outcome.status} ({outcome.detail})"
        for pairs, outcomes in ((calm, calm_outcomes), (rough, rough_outcomes))
        for (answer, gold, expected), outcome in zip(pairs, outcomes, strict=True)
        if outcome.status != expected
    ]
    for surprise in surprises[:10]:
        print(surprise)
    late = rough_seconds > options.bar
    print(f"\n1 % hanging: {rough_seconds:.1f} s, bar {options.bar:g} s: {'MISSED' if late else 'met'}")
    return 1 if late or surprises else 0


if __name__ == "__main__":
    sys.exit(main())
