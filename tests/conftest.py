"""Settings for all tests."""

from __future__ import annotations

import os

import hypothesis
import torch

torch.set_num_threads(min(2, os.cpu_count() or 1))  # results must not depend on the machine's size
# No deadline: shared machines stall. In CI the examples are the same in every run, so a red run can be repeated.
hypothesis.settings.register_profile("iwopd", deadline=None, derandomize="CI" in os.environ, print_blob=True)
hypothesis.settings.load_profile("iwopd")
