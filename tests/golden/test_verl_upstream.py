"""Faults of verl that are described for its authors: the reproduction still shows them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from waiting import PATIENCE

UPSTREAM = Path(__file__).parents[2] / "docs" / "upstream"


def test_ragged_rollout_is_weights() -> None:
    """When this fails with exit code 0, the fault is mended: `pad_rollout_weights` and the description can go."""
    command = [sys.executable, UPSTREAM / "rollout_is_weights.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1, done.stdout + done.stderr
    shown = [line for line in done.stdout.splitlines() if "rollout_is_weights" in line]
    assert len(shown) == 2
    text = (UPSTREAM / "rollout_is_weights.md").read_text()
    assert "\n".join(shown) in text, f"the description shows another output than {shown}"
    assert "iwopd" not in (UPSTREAM / "rollout_is_weights.py").read_text()  # it needs nothing of ours
