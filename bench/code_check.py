"""Canonical solutions of HumanEval+ and MBPP+ through the sandbox: how many pass, how long it takes, how much memory it costs.

    python bench/code_check.py [--data FOLDER] [--backend bubblewrap|landlock] [--workers N] [--cached]

Without --cached the expected outputs are made anew, which runs every canonical solution once more.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path

from iwopd.eval import evalplus
from iwopd.eval.code import check_code
from iwopd.eval.evalplus_problems import load_problems
from iwopd.eval.sandbox import probe

SETS = ("HumanEvalPlus.jsonl", "HumanEvalPlus-Mini.jsonl", "MbppPlus.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = os.environ.get("IWOPD_DATA", Path(__file__).parent.parent.parent / "shared" / "data")
    parser.add_argument("--data", type=Path, default=Path(data), help="folder with the sets (default: $IWOPD_DATA)")
    parser.add_argument("--backend", choices=["bubblewrap", "landlock"])
    parser.add_argument("--workers", type=int)
    parser.add_argument("--cached", action="store_true", help="use the user's cache of expected outputs")
    parser.add_argument("--sets", nargs="*", default=SETS)
    options = parser.parse_args()
    print(f"backend: {probe.choose(name=options.backend).name}, load of the machine: {os.getloadavg()[0]:.1f}")
    print(f"one check: {_one_check(options.backend) * 1000:.0f} ms")
    with tempfile.TemporaryDirectory() as folder:
        if not options.cached:
            evalplus._cache_folder = lambda: Path(folder)
        for name in options.sets:
            _run(options.data / name, options)


def _one_check(backend: str | None) -> float:
    start = time.perf_counter()
    for _ in range(20):
        check_code("def f(x):\n    return x + 1", "f", [([1], 2)], backend=backend)
    return (time.perf_counter() - start) / 20


def _run(path: Path, options: argparse.Namespace) -> None:
    problems = load_problems(path)
    wall, used = time.perf_counter(), _cpu()
    verdicts = evalplus.check_solutions(
        [(problem, problem.reference) for problem in problems], workers=options.workers, backend=options.backend
    )
    wall, used = time.perf_counter() - wall, _cpu() - used
    base = sum(verdict.base.status == "pass" for verdict in verdicts)
    both = sum(verdict.passed for verdict in verdicts)
    print(f"{path.name}: base {base}, base and plus {both} of {len(verdicts)}; {wall:.0f} s, {used:.0f} s of CPU")
    for verdict in verdicts:
        if not verdict.passed:
            print(f"  {verdict.id}: base {verdict.base}, plus {verdict.plus}")


def _cpu() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
