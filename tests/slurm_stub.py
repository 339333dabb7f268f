"""A Slurm of a few machines that are network namespaces (`netns.py`): stands in for `sbatch`, `srun` and `scontrol`.

They start the real commands, on the machines that Slurm would choose, and pass SIGTERM on as Slurm does. Not covered: Slurm's
own limits, queues, time limits and its shared accounting. Run as a program, this file is `srun` or `scontrol`.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

MACHINES = "IWOPD_STUB_MACHINES"
"""Nodes and their network namespaces: `address=name,...`."""
FLAGS = ("--nodes", "--ntasks", "--nodelist", "--exclude", "--overlap")
"""Options of srun that the scripts use; any other one is an error."""


def install(folder: Path) -> None:
    """Programs `srun` and `scontrol` in a folder for PATH."""
    folder.mkdir()
    for name in ("srun", "scontrol"):
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)


def environment(addresses: dict[str, str], gpus: int, cpus: int) -> dict[str, str]:
    """What a job finds; addresses: of the nodes, with the names of their namespaces."""
    return {
        MACHINES: ",".join(f"{node}={name}" for node, name in addresses.items()),
        "SLURM_JOB_NODELIST": ",".join(addresses),
        "SLURM_JOB_NUM_NODES": str(len(addresses)),
        "SLURM_GPUS_ON_NODE": str(gpus),
        "SLURM_CPUS_PER_TASK": str(cpus),
    }


def srun(words: Sequence[str]) -> int:
    """One task on each of the chosen nodes; the highest exit code of theirs."""
    rest = list(words)
    options: dict[str, str] = {}
    while rest and rest[0].startswith("--"):
        name, _, value = rest.pop(0).partition("=")
        if name not in FLAGS:
            raise SystemExit(f"srun: unrecognized option '{name}'")
        options[name] = value
    machines = dict(item.split("=") for item in os.environ[MACHINES].split(","))
    chosen = options.get("--nodelist", "").split(",") if "--nodelist" in options else list(machines)
    chosen = [node for node in chosen if node not in options.get("--exclude", "").split(",")]
    if len(chosen) != int(options["--nodes"]) or options["--nodes"] != options["--ntasks"]:
        raise SystemExit(f"srun: error: {options['--nodes']} nodes were asked for, there are {len(chosen)}")
    tasks = [subprocess.Popen(["ip", "netns", "exec", machines[node], *rest], start_new_session=True) for node in chosen]

    def forward(number: int, _: FrameType | None) -> None:
        for task in tasks:
            if task.poll() is None:
                os.killpg(task.pid, number)

    signal.signal(signal.SIGTERM, forward)
    codes = [task.wait() for task in tasks]
    return max(128 - code if code < 0 else code for code in codes)


def scontrol(words: Sequence[str]) -> int:
    if list(words[:2]) != ["show", "hostnames"]:
        raise SystemExit(f"scontrol: invalid keyword: {' '.join(words)}")
    print("\n".join(words[2].split(",")))
    return 0


if __name__ == "__main__":
    sys.exit({"srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
