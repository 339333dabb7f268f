"""The checklist in its order. Every check runs in processes of its own: a crash, a hang or a full GPU is one line of many."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from iwopd.config import Config
from iwopd.train.doctor.findings import Finding, failure, warning
from iwopd.train.doctor.gpu import engine, flash, ranks, steps
from iwopd.train.doctor.gpu.devices import choose_device, variables
from iwopd.train.doctor.gpu.isolation import CHILD, run_alone
from iwopd.train.doctor.gpu.wire import read_findings

REPORT = "report it with this whole output"
VLLM_SECONDS, RECIPE_SECONDS = 900, 3600
Say = Callable[[str], None]


@dataclass(frozen=True)
class Subject:
    """What is examined."""

    device: str
    """cuda:N or cpu."""
    config: Config | None
    """Of a recipe that is to train here."""
    recipe: Sequence[str]
    """The recipe as `iwopd doctor` takes it: its file, overrides and options."""


@dataclass(frozen=True)
class Check:
    name: str
    title: str
    seconds: float
    run: Callable[[Subject, Path], Iterator[Finding]]
    """Gets the subject and an empty folder of its own."""


def examine_gpu(
    asked: str | None, config: Config | None = None, recipe: Sequence[str] = (), say: Say = lambda _: None
) -> Iterator[Finding]:
    """All checks, one after the other; `say` hears which one begins."""
    device = choose_device(asked)
    if isinstance(device, Finding):
        yield device
        return
    with tempfile.TemporaryDirectory(prefix="iwopd-doctor-", ignore_cleanup_errors=True) as folder:
        subject = Subject(device, config, recipe)
        for place, check in enumerate(CHECKS):
            if check.name == "recipe" and not recipe:
                continue
            own = Path(folder) / str(place)
            own.mkdir()
            say(f"...   {check.name:<14}  {check.title} (at most {check.seconds:g} s)")
            try:
                yield from check.run(subject, own)
            except Exception as error:  # one that fails must not keep the others from running
                yield failure(check.name, f"the check itself failed: {type(error).__name__}: {error}", REPORT)


def verdict(findings: Sequence[Finding]) -> str:
    """The last line: ready, or what to do."""
    failed = [finding for finding in findings if finding.level == "fail"]
    if not failed:
        return "ready"
    return "not ready: " + "; ".join(dict.fromkeys(f"{finding.check}: {finding.remedy}" for finding in failed))


def run_isolated(name: str, subject: Subject, folder: Path, seconds: float, remedy: str = REPORT) -> Iterator[Finding]:
    """A check of `child.CHECKS`; how its process ends is a finding, too, unless it ends well."""
    kind = subject.device.partition(":")[0]
    file = folder / "found.jsonl"
    ended = run_alone([*CHILD, name, kind, str(file)], variables(subject.device), seconds=seconds, folder=folder)
    yield from read_findings(file)
    if ended.code != 0:
        last = ended.words.splitlines()[-1] if ended.words else ""
        yield failure(name, f"its process {ended.how}" + (f": {last}" if last else ""), remedy, ended.words)


def _isolated(name: str, title: str, seconds: float) -> Check:
    return Check(name, title, seconds, lambda subject, folder: run_isolated(name, subject, folder, seconds))


def _flash(subject: Subject, folder: Path) -> Iterator[Finding]:
    wanted = subject.config is not None and str(subject.config.models.attention).startswith("flash_attention")
    for finding in run_isolated("flash", subject, folder, 300, flash.INSTALL):
        missing = wanted and finding.level == "warn"
        yield replace(finding, level="fail", message=f"the recipe wants it. {finding.message}") if missing else finding


def _ranks(subject: Subject, folder: Path) -> Iterator[Finding]:
    count = ranks.CPU_RANKS if subject.device == "cpu" else torch.cuda.device_count()
    yield from ranks.check_ranks(subject.device, count, folder)


def _vllm(subject: Subject, folder: Path) -> Iterator[Finding]:
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin is not None:  # else a mere folder of that name
        yield from run_isolated("vllm", subject, folder, VLLM_SECONDS, engine.REMEDY)
        return
    remedy = "install it in an environment of its own: pip install 'iwopd[vllm]' (docs/vllm.md)"
    if subject.config is not None and subject.config.rollout.engine == "vllm":
        message = "vLLM is not installed, and the recipe's rollout.engine is 'vllm'"
        yield failure("vllm", message, f"{remedy}, or set rollout.engine = 'local'")
    else:
        message = "vLLM is not installed: the local engine writes, which takes long for long answers"
        yield warning("vllm", message, remedy)


def _steps(subject: Subject, folder: Path) -> Iterator[Finding]:
    yield from steps.check_steps(subject.device, subject.config, folder)


def _recipe(subject: Subject, folder: Path) -> Iterator[Finding]:
    """`iwopd doctor RECIPE` on the device: its own lines."""
    command = [sys.executable, "-m", "iwopd", "doctor", *subject.recipe]
    ended = run_alone(command, variables(subject.device), seconds=RECIPE_SECONDS, folder=folder)
    words = f"`iwopd doctor {subject.recipe[0]}` on {subject.device}"
    if ended.code == 0:
        yield Finding("pass", "recipe", words, details=ended.output)
    else:
        yield failure("recipe", f"{words} {ended.how}", "do what its lines say", ended.output)


CHECKS = (
    _isolated("device", "versions, name, memory", 120),
    _isolated("products", "matrix products against the CPU's", 300),
    _isolated("attention", "torch's attention, all backends", 300),
    _isolated("optimizer", "fused AdamW", 300),
    _isolated("sampling", "sampling noise and draws", 300),
    Check("flash", "packed sequences in bfloat16", 300, _flash),
    Check("ranks", "several processes that talk", ranks.SECONDS, _ranks),
    Check("vllm", "start, log-probs, new weights", VLLM_SECONDS, _vllm),
    Check("steps", "three steps on the device and on the CPU", 3 * steps.SECONDS, _steps),
    Check("recipe", "the recipe's own checks on the device", RECIPE_SECONDS, _recipe),
)
