"""verl's main program as a process: its command, its output, how to end it and why it failed."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from iwopd.cluster.verl.errors import VerlError
from iwopd.cluster.verl.params import literal
from iwopd.cluster.verl.stops import METRICS_PATH
from iwopd.cluster.verl.translate import Places, environment_overrides, translate
from iwopd.config import Config

PROGRAM = "iwopd.cluster.verl.main"
STAND_IN = "IWOPD_VERL_CPU"
"""For tests: the name of a module (`tests/verl_testing`) with which verl runs on CPUs."""
LOCAL = "local"
"""Address that starts a Ray for this run."""
RUNNING = "auto"
"""Address of the Ray cluster that this machine belongs to."""
CONNECT = 60.0
"""Seconds for a Ray cluster to answer."""
GRACE = 60.0
"""Seconds that Ray gets to end its workers before the process is killed."""
_ERROR = re.compile(r"^(?:\([^)]*\) )?(?:[\w.]+\.)?\w*(?:Error|Exception|Killed|OutOfMemory)\w*\b.*")
_ASK = """
import json, sys, ray
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
print(json.dumps([node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]]))
"""


def command(
    config: Config, where: Places, address: str, resume: Path | None = None, *, evaluate_first: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Arguments for Python, and environment variables."""
    variables = {METRICS_PATH: str(where.metrics)}
    overrides = [
        f"hydra.run.dir={literal(str(where.folder / 'hydra'))}",
        *translate(config, where, resume, evaluate_first=evaluate_first),
        *environment_overrides(variables),
    ]
    if stand_in := os.environ.get(STAND_IN):
        testing = importlib.import_module(stand_in)
        variables |= testing.environment()
        gpus = config.cluster.nodes * config.cluster.gpus_per_node
        overrides += testing.overrides(config, gpus if address == LOCAL else None)
    return ["-m", PROGRAM, *overrides], {"RAY_ADDRESS": address, **variables}


def shown(arguments: Sequence[str], variables: Mapping[str, str], python: str = "python") -> str:
    """The command as shell text."""
    lines = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " \\\n  ".join([*lines, f"{python} {' '.join(arguments[:2])}", *(shlex.quote(word) for word in arguments[2:])])


def ray_address(given: str | None) -> str:
    """Ray's address: as given, from RAY_ADDRESS, or `local` (started for this run)."""
    address = given or os.environ.get("RAY_ADDRESS") or LOCAL
    if address.startswith(("http://", "https://")):
        raise VerlError(
            f"the Ray address {address} accepts jobs, and the launcher must run as one: "
            f"ray job submit --address {address} -- iwopd train RECIPE --engine verl ..."
        )
    return address


def check_size(config: Config, address: str) -> None:
    """Refuse a cluster that is smaller than requested, before verl spends minutes on it."""
    wanted, each = config.cluster.nodes, config.cluster.gpus_per_node
    asked = f"cluster.nodes x cluster.gpus_per_node asks for {wanted} x {each} GPUs"
    if address == LOCAL:
        if os.environ.get(STAND_IN):
            return
        import torch

        if wanted > 1:
            raise VerlError(f"{asked}, but no Ray cluster is named: start one (docs/cluster.md) and give --ray-address auto")
        if (found := torch.cuda.device_count()) < each:
            raise VerlError(f"{asked}, and this machine has {found}: lower them, or name a Ray cluster with --ray-address")
        return
    there = _ask(address)
    if sum(int(gpus) // each for gpus in there) < wanted:
        have = f"the machines of the Ray cluster at {address} have {', '.join(f'{gpus:g}' for gpus in there)}"
        raise VerlError(f"{asked}, but {have}: wait for more, or ask for fewer")


def _ask(address: str) -> list[float]:
    nobody = f"no Ray cluster answers at {address}"
    try:
        done = subprocess.run([sys.executable, "-c", _ASK, address], capture_output=True, text=True, timeout=CONNECT)
    except subprocess.TimeoutExpired:
        raise VerlError(f"{nobody}: start it (ray start --head), or leave --ray-address out") from None
    if done.returncode:
        words = done.stderr.strip().splitlines()[-1:] or ["no word"]
        raise VerlError(f"{nobody} ({words[0]}): start it (ray start --head), or correct the address")
    found: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


class VerlJob:
    """The running program. It has its own session, so that Ctrl-C at the terminal reaches only the launcher."""

    def __init__(
        self, arguments: Sequence[str], variables: Mapping[str, str], log: Path, inherited: Sequence[int] = ()
    ) -> None:
        """`inherited`: descriptors that stay open in the job, such as the run directory's lock."""
        self.log = log
        place = {**os.environ, **variables, "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                env=place,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=inherited,
            )

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def end(self) -> None:
        """Interrupt the driver, which makes Ray end the job's workers; then kill what is left. (SIGTERM would make it save.)"""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what is left of its process group
        self.process.wait()

    def last_words(self) -> str:
        """Why it failed: its message for the user, else the last error that it printed."""
        lines = [line.rstrip() for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines()]
        own = [line.removeprefix("iwopd: ") for line in lines if line.startswith("iwopd: ")]
        if own:
            return own[-1]
        errors = [place for place, line in enumerate(lines) if _ERROR.match(line)]
        return lines[errors[-1]] + _who(lines[errors[-1] + 1 :]) if errors else "\n".join(lines[-5:])


def _who(following: Sequence[str]) -> str:
    """The actor that a Ray error is about, from the `name: value` lines that follow it."""
    own = itertools.takewhile(lambda line: line.startswith("\t"), following)
    details = {name: value for name, _, value in (line.strip().partition(": ") for line in own)}
    names = [details[key] for key in ("class_name", "name") if key in details]
    return f" ({' '.join(names)})" if names else ""
