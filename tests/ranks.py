"""Several training processes, as torchrun starts them: real gloo ranks that run `iwopd train`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomli_w

SCRIPT = """
import os, sys
{before}
from iwopd.cli import main
if __name__ == "__main__":
    main(sys.argv[1:])
"""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}


def train_in_ranks(
    count: int, settings: dict[str, Any], out: Path, *, before: str = "", code: int = 0, seconds: int = 300
) -> str:
    """`iwopd train` in `count` processes; returns what they said. `before`: run first in each, with RANK in its environment."""
    recipe, script = out.with_suffix(".toml"), out.with_suffix(".py")
    recipe.write_text(tomli_w.dumps(settings))
    script.write_text(SCRIPT.format(before=before))
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", "--standalone"]
    words = [*launcher, str(script), "train", str(recipe), "--out", str(out)]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=seconds)
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    return said
