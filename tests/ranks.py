"""Several training processes: real gloo ranks that run `iwopd train`, as torchrun starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomli_w

import forked
from waiting import PATIENCE

SCRIPT = """
import os, sys
{before}
from iwopd.cli import main
if __name__ == "__main__":
    main(sys.argv[1:])
"""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}


def train_in_ranks(
    count: int,
    settings: dict[str, Any],
    out: Path,
    *,
    before: str = "",
    resume: bool = False,
    code: int = 0,
    launcher: bool = False,
    seconds: float = PATIENCE,
) -> str:
    """`iwopd train` in `count` processes; returns what they said. `before`: run first in each, with RANK in its environment.

    `launcher`: under torchrun itself, which ends all when one has failed.
    """
    recipe = out.with_suffix(".toml")
    recipe.write_text(tomli_w.dumps(settings))
    words = ["train", str(recipe), "--out", str(out), *(["--resume"] if resume else [])]
    ended, said = _under_torchrun(count, words, out, before, seconds) if launcher else _forked(count, words, before, seconds)
    assert ended == code, said
    return said


def _under_torchrun(count: int, words: list[str], out: Path, before: str, seconds: float) -> tuple[int, str]:
    script = out.with_suffix(".py")
    script.write_text(SCRIPT.format(before=before))
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", "--standalone", str(script), *words]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=seconds)
    return done.returncode, done.stdout + done.stderr


def _forked(count: int, words: list[str], before: str, seconds: float) -> tuple[int, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = []
    for rank in range(count):
        place = {name: str(value) for name, value in {**world, "RANK": rank, "LOCAL_RANK": rank}.items()}
        ranks.append(forked.start(*words, env={**ENVIRONMENT, **place}, before=before))
    said = [rank.communicate(seconds)[0] for rank in ranks]
    return max((abs(rank.wait()) for rank in ranks), default=0), "".join(said)
