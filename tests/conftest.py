"""Settings for all tests."""

from __future__ import annotations

import os
from importlib.util import find_spec

import hypothesis
import torch

import debian

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
collect_ignore += ["cluster/test_before_the_split.py", "cluster/test_failures.py"]  # a quarter of an hour: `make test-cluster`


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
