"""Half an hour of training with a fault every minute: does it end with the weights of an undisturbed run?

    python bench/soak.py                        # 30 minutes with faults, then as many steps without
    python bench/soak.py --minutes 3 --every 15 # a short one

The tiny world `clean`, its teacher behind `iwopd serve-teacher`, its rollouts behind the rollout server of the tests (a local
sampler that speaks vLLM's dialect and, like a vLLM server, has the first weights when it is started again). Both stand
behind a proxy. Every minute one fault, for some seconds: a server is killed and started again, or stopped (SIGSTOP), the proxy
is slow, drops connections or answers rubbish; the trainer is killed (SIGKILL); the file system of the run is full until the
trainer has met it (a small tmpfs; only as root). All kinds come in an order drawn by seed, then all again (`soak_schedule.py`).
A trainer that ends is resumed, and the next fault waits until it has saved a step: faults that come faster than a trainer
starts would stop the run for good. When the time is over and every kind has come it is asked to stop, and a run without faults
takes as many steps.
Both must have the same weights, every step must be in the log once, no process and no temporary file left, and a trainer that
was not killed must have ended in words. Memory of every process is sampled; the slope is that of the longest-lived one, in the
second half of its life: on a busy machine it loads for minutes.

During the disturbed run the proxies hold every piece back for a moment (`--delay`): servers that are far away, and fewer steps
to repeat.

Exit code 1 if the weights differ, a step is missing or double, a trainer ended without words, or something is left over.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak_proxy import Proxy
from soak_schedule import kinds, schedule

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = 8
SAMPLED_SECONDS = 5.0
WARM_UP = 60.0
"""Seconds of a process's life that its slope leaves out, at least."""
DISK_MB = 48
MOST_RESUMES = 200
FULL_SECONDS = 60.0
"""A full disk waits so long for the trainer to write something."""
ENDLESS = 1_000_000
"""Steps of a run that is asked to stop."""
WORDLESS = "traceback"
STOPPED = 128 + signal.SIGTERM
"""Exit code of a trainer that was asked to stop and saved its last step."""


@dataclass
class Memory:
    """Resident megabytes of processes over time, by role and process."""

    samples: dict[tuple[str, int], list[tuple[float, float]]] = field(default_factory=dict)

    def sample(self, role: str, pid: int) -> None:
        with suppress(OSError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            self.samples.setdefault((role, pid), []).append((time.monotonic(), pages * os.sysconf("SC_PAGE_SIZE") / 2**20))

    def slopes(self) -> Iterator[str]:
        """MB an hour of the longest-lived process of each role, by least squares."""
        for role in sorted({role for role, _ in self.samples}):
            longest = max(
                (points for (other, _), points in self.samples.items() if other == role), key=lambda p: p[-1][0] - p[0][0]
            )
            began, ended = longest[0][0], longest[-1][0]
            points = [(when - began, size) for when, size in longest if when - began >= max(WARM_UP, (ended - began) / 2)]
            if len(points) < 3:
                yield f"{role}: no process lived long enough for a slope"
                continue
            mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
            over = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
            minutes = (points[-1][0] - points[0][0]) / 60
            yield f"{role}: {3600 * over:+.1f} MB an hour over its last {minutes:.0f} minutes, at {mean_y:.0f} MB"


class Server:
    """A server process on a fixed port that can be killed and started again."""

    def __init__(self, role: str, command: list[str], port: int, environment: dict[str, str]) -> None:
        self.role, self.port = role, port
        self._command, self._environment = command, environment
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def wait_until_ready(self, seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.2)
        raise SystemExit(f"{self.role} did not start: {' '.join(self._command)}")

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()


@dataclass
class Stage:
    """Everything that can be disturbed."""

    teacher: Server
    rollouts: Server
    lineage: int
    proxies: dict[str, Proxy]
    disk: Path | None
    """A small file system that holds the run, if there is one."""
    trainer: subprocess.Popen[bytes] | None = None

    def disturb(self, fault: str, seconds: float) -> None:
        """One fault, over when this returns."""
        what, _, role = fault.partition(" ")
        if fault == "kill trainer":
            if self.trainer is not None:
                self.trainer.kill()
        elif fault == "full disk":
            assert self.disk is not None
            assert self.trainer is not None
            with _full(self.disk), suppress(subprocess.TimeoutExpired):
                self.trainer.wait(FULL_SECONDS)
        elif what in ("kill", "stop"):
            server: Server = getattr(self, role)
            server.signal(signal.SIGKILL if what == "kill" else signal.SIGSTOP)
            time.sleep(seconds)
            if what == "kill":
                server.start()
            else:
                server.signal(signal.SIGCONT)
        else:
            proxy = self.proxies[role]
            proxy.mood = what  # type: ignore[assignment]
            if what != "slow":
                proxy.hang_up()
            time.sleep(seconds)
            proxy.mood = "pass"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="how long the disturbed run takes (default: 30)")
    parser.add_argument("--every", type=float, default=60, help="seconds between two faults (default: 60)")
    parser.add_argument("--lasts", type=float, default=8, help="seconds that a fault lasts (default: 8)")
    parser.add_argument("--delay", type=float, default=0.1, help="of every piece of the disturbed run (default: 0.1 s)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default: 0)")
    parser.add_argument("--lineage", type=int, default=0, help="of the world's models (default: 0)")
    parser.add_argument("--only", help="faults to draw from, by a part of their name, e.g. 'kill rollouts'")
    parser.add_argument("--serve-rollouts", nargs=2, metavar=("MODEL", "PORT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_rollouts:
        return serve_rollouts(*options.serve_rollouts)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))  # leaves nothing behind either
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        return soak(options, Path(folder))


def soak(options: argparse.Namespace, folder: Path) -> int:
    memory = Memory()
    with stage(folder, options.lineage) as there:
        run, calm = (there.disk or folder) / "disturbed", folder / "calm"
        wordless = disturbed_run(options, there, folder, run, memory)
        done = logged(run)
        steps = max(done)
        for proxy in there.proxies.values():
            proxy.delay = 0.0
        began = time.monotonic()
        if undisturbed_run(there, folder, calm, steps, memory) != 0:
            print(f"the undisturbed run failed: {last_words(folder)}")
            return 1
        print(f"the same {steps} steps without faults: {(time.monotonic() - began) / 60:.1f} minutes", flush=True)
        same, once = weights(run) == weights(calm), done == list(range(1, steps + 1))
        strange = sorted(p.name for p in run.rglob("*") if p.name.endswith((".tmp", ".partial")) or p.name.startswith(".tmp"))
    strange += [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith(("torch", "pymp"))]
    left = processes(str(folder))
    print(f"weights {'equal those' if same else 'DIFFER from those'} of the undisturbed run")
    print(f"steps in the log: {'each once' if once else 'NOT each once'}")
    print(f"ended without words: {wordless or 'never'}")
    print(f"left over: {', '.join([*strange, *left]) or 'nothing'}")
    for line in memory.slopes():
        print(line)
    return 0 if same and once and not wordless and not strange and not left else 1


def disturbed_run(options: argparse.Namespace, there: Stage, folder: Path, run: Path, memory: Memory) -> int:
    """Train for `--minutes` with a fault now and then; how often the trainer ended with a traceback."""
    chosen = [one for one in kinds(disk=there.disk is not None) if not options.only or options.only in one]
    print(f"faults: {', '.join(chosen)}", flush=True)
    coming, faults, ended = schedule(chosen, options.seed), [""], Counter[str]()
    for proxy in there.proxies.values():
        proxy.delay = options.delay
    began, due, found = time.monotonic(), options.every, newest(run)
    there.trainer = train(there, folder, run, ENDLESS)
    while (code := there.trainer.poll()) != STOPPED:
        sample(memory, there, "trainer")
        if code is not None:
            ended[f"{faults[-1]}: exit code {code}, {last_words(folder)}"] += 1
            found = newest(run)
            there.trainer = train(there, folder, run, ENDLESS, resume=(run / "run.json").exists())
        now = time.monotonic() - began
        if ended.total() > MOST_RESUMES or now > 4 * 60 * options.minutes:
            raise SystemExit(f"given up at step {len(logged(run))} after {ended.total()} resumes: {last_words(folder)}")
        if now < due or newest(run) == found:
            pass
        elif now > 60 * options.minutes and not set(chosen) - set(faults):
            there.trainer.terminate()
            due = now + options.every
        else:
            fault, length = next(coming)
            faults.append(fault)
            print(f"{now / 60:5.1f} min, step {len(logged(run))}: {fault}", flush=True)
            there.disturb(fault, options.lasts * length)
            due = now + options.every
        time.sleep(SAMPLED_SECONDS / 5)
    minutes = (time.monotonic() - began) / 60
    print(f"{len(logged(run))} steps in {minutes:.1f} minutes, {len(faults) - 1} faults, {ended.total()} resumes", flush=True)
    print("  " + ", ".join(f"{fault} {times}" for fault, times in sorted(Counter(faults[1:]).items())))
    for words, times in sorted(ended.items()):
        print(f"  {times} x after {words}")
    return sum(times for words, times in ended.items() if WORDLESS in words)


def undisturbed_run(there: Stage, folder: Path, run: Path, steps: int, memory: Memory) -> int:
    """The same training without faults; its exit code."""
    there.trainer = train(there, folder, run, steps)
    while there.trainer.poll() is None:
        sample(memory, there, "trainer without faults")
        time.sleep(SAMPLED_SECONDS / 5)
    return there.trainer.returncode


def sample(memory: Memory, there: Stage, trainer: str) -> None:
    """Note the memory of the trainer, under this name, and of the servers."""
    assert there.trainer is not None
    memory.sample(trainer, there.trainer.pid)
    for server in servers(there):
        if server.process is not None:
            memory.sample(server.role, server.process.pid)


@contextmanager
def stage(folder: Path, lineage: int) -> Iterator[Stage]:
    from iwopd import tiny

    world = tiny.open_world(tiny.world_recipe("clean", lineage=lineage))
    (folder / "tmp").mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder / "tmp")}
    ports = [_free_port() for _ in range(2)]
    python = [sys.executable, "-m", "iwopd"]
    teach = [*python, "serve-teacher", str(world.teacher), "--port", str(ports[0]), "--threads", "1", "--name", "teacher"]
    write = [sys.executable, str(Path(__file__).resolve()), "--serve-rollouts", str(world.student), str(ports[1])]
    teacher = Server("teacher", teach, ports[0], environment)
    rollouts = Server("rollouts", write, ports[1], environment)
    there = Stage(teacher, rollouts, lineage, {"teacher": Proxy(ports[0]), "rollouts": Proxy(ports[1])}, _small_disk(folder))
    try:
        for server in servers(there):
            server.wait_until_ready()
        yield there
    finally:
        if there.trainer is not None and there.trainer.poll() is None:
            there.trainer.kill()
        for server in servers(there):
            server.signal(signal.SIGKILL)
        for proxy in there.proxies.values():
            proxy.close()
        if there.disk is not None:
            subprocess.run(["umount", "-l", str(there.disk)], check=False)


def servers(there: Stage) -> list[Server]:
    return [there.teacher, there.rollouts]


def train(there: Stage, folder: Path, run: Path, steps: int, *, resume: bool = False) -> subprocess.Popen[bytes]:
    """The trainer, in the background."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder / "tmp")}
    command = [sys.executable, "-m", "iwopd", "train"]
    if resume:
        command += [str(run), "--resume"]
    else:
        shutil.rmtree(run, ignore_errors=True)
        exchange = folder / f"weights-{run.name}"
        command += [
            str(ROOT / "src/iwopd/recipes/tiny/opd.toml"),
            "--out",
            str(run),
            "--steps",
            str(steps),
            "--threads",
            "1",
            "--no-doctor",
        ]
        command += ["--models.lineage", str(there.lineage)]
        command += ["--rollout.prompts_per_step", str(PROMPTS), "--rollout.engine", "server", "--engine.server.url"]
        command += [there.proxies["rollouts"].url, "--engine.server.weights_folder", str(exchange)]
        command += ["--engine.server.patience", "60", "--engine.server.request_timeout", "20"]
        command += [
            "--teacher.urls",
            f"['{there.proxies['teacher'].url}']",
            "--teacher.dialect",
            "iwopd",
            "--teacher.patience",
            "60",
        ]
        command += ["--teacher.request_timeout", "20", "--eval.every", "100000", "--eval.prompts", "0"]
        command += ["--checkpoint.every", "5", "--tracking.console", "off"]
    with (folder / "trainer.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder)


def serve_rollouts(model: str, port: str) -> int:
    """The rollout server of the tests, in this process, until it is killed."""
    sys.path.append(str(ROOT / "tests"))
    from iwopd.models import load_model
    from rollout_server import RolloutServer, listening

    server = RolloutServer(load_model(model).eval())
    listening(server, int(port)).serve_forever()
    return 0


def newest(run: Path) -> Path | None:
    """The last checkpoint of a run."""
    return max((run / "checkpoints").glob("step-*"), default=None)


def weights(run: Path) -> str:
    """Hash of the weights of a run's last checkpoint."""
    last = newest(run)
    if last is None:
        return "no checkpoint"
    digest = hashlib.sha256()
    for path in sorted((last / "model").glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def logged(run: Path) -> list[int]:
    """Steps in the log, in its order."""
    with suppress(OSError, ValueError):
        return [int(json.loads(line)["step"]) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return []


def last_words(folder: Path) -> str:
    """The trainer's last line, without numbers; marked if a traceback stands before it."""
    text = (folder / "trainer.log").read_text(errors="replace").strip()
    line = re.sub(r"\d{2,}", "N", text.splitlines()[-1].replace(f"{folder}/", ""))[:160] if text else "no word"
    return f"{WORDLESS}: {line}" if "Traceback (most recent" in text else line


def processes(mark: str) -> list[str]:
    """Processes whose command line names this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if mark in words and int(path.parent.name) != os.getpid():
                found.append(f"process {path.parent.name} ({words[:60]})")
    return found


@contextmanager
def _full(disk: Path) -> Iterator[None]:
    """Nothing can be written there."""
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(b"\0" * 65536)
            file.flush()
    try:
        yield
    finally:
        filler.unlink(missing_ok=True)


def _small_disk(folder: Path) -> Path | None:
    """A file system of a few megabytes, if this process may mount one."""
    disk = folder / "disk"
    disk.mkdir()
    done: Any = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(disk)], check=False, capture_output=True
    )
    if done.returncode == 0:
        return disk
    print("no small file system can be mounted here: the fault 'full disk' is left out")
    return None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
