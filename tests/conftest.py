"""Settings for all tests."""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

import debian
import forked

# Results must not depend on the machine's size, nor differ between this process and its children. Side by side: a core each.
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1)
torch.set_num_threads(THREADS)
os.environ["OMP_NUM_THREADS"] = str(THREADS)
# No deadline: shared machines stall. In CI the examples are the same in every run, so a red run can be repeated.
hypothesis.settings.register_profile("iwopd", deadline=None, derandomize="CI" in os.environ, print_blob=True)
hypothesis.settings.load_profile("iwopd")

_vllm = find_spec("vllm")  # the folder of tests of that name counts as a package without an origin
collect_ignore = [] if _vllm is not None and _vllm.origin else ["vllm"]
"""Tests against the real vLLM have an environment of their own: `make test-vllm`."""
collect_ignore += ["cluster_vllm"]  # so have those of verl with vLLM: `make test-cluster-vllm`
JOBS = ("test_end_to_end.py", "test_horizons.py")
"""Whole jobs on verl that are part of `make test`; the others take an hour: `make test-cluster`."""
collect_ignore += [str(path) for path in (Path(__file__).parent / "cluster").glob("test_*.py") if path.name not in JOBS]


LONGEST = (
    *("e2e/test_demo.py", "unit/test_memory.py", "e2e/test_sandbox_hostile.py", "e2e/test_checkpoint_kill.py"),
    *("cluster/test_end_to_end.py", "cluster/test_horizons.py", "e2e/test_train.py", "e2e/test_sharding.py"),
    *("e2e/test_teacher_server.py", "e2e/test_long_answers.py", "e2e/test_verl_fsdp.py", "unit/test_step_memory.py"),
)
"""Files that come first, so that side by side nobody is left with a long one at the end. The others keep their order, in which
the short ones (unit) come last."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


# --- CPU seconds by file ----------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu", type=int, metavar="N", help="list the N files with most CPU seconds, of processes they waited for, too"
    )


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used) + forked.spent


_STARTED = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_STARTED] = _cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    now = _cpu_seconds()
    report.cpu_seconds, item.stash[_STARTED] = now - item.stash[_STARTED], now
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if (count := config.getoption("--cpu")) is None:
        return
    used: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "cpu_seconds"):
                used[report.nodeid.partition("::")[0]] += report.cpu_seconds
    terminalreporter.section(f"CPU seconds: {sum(used.values()):.0f} in {len(used)} files")
    for name, seconds in used.most_common(count):
        terminalreporter.line(f"{seconds:8.1f}  {name}")


def pytest_report_header() -> str | None:
    """Before any test: which system packages the suite will install, or whose tests are skipped."""
    lacking = debian.lacking()
    if not lacking:
        return None
    names = ", ".join(lacking)
    if debian.may_install():
        return f"system packages: {names} will be installed with apt-get when a test needs them (CI or IWOPD_APT is set)"
    return (
        f"system packages: without {names} some tests are skipped; IWOPD_APT=1 lets the suite install them, as root on Debian"
    )
