"""The run directory as a run writes it; `reading` reads it.

    run.json          format version, version of iwopd, fingerprint of the data
    config.toml       the resolved settings
    metrics.jsonl     one object per step
    evals.jsonl       one object per evaluation
    prompts.json      how prompts are rendered, and three of them
    rollouts.jsonl    a few rollouts of each evaluation, token by token
    owner.lock        while a process writes here: which one (`owner`)
    checkpoints/      see `train.checkpoint`

`docs/run-directory.md` has the fields.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import iwopd
from iwopd.config import Config, config_toml, differences, load_config
from iwopd.filesystem import write_atomic
from iwopd.runs.evaluations import sound_evaluation
from iwopd.runs.logs import RunError, listed, read_log, set_aside, sound_metrics, sound_record, split_lines
from iwopd.runs.owner import Ownership, owned, refuse_owned
from iwopd.runs.reading import FORMAT, Run

LONG = 300
"""Letters of a changed setting that are shown."""
LOGS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "metrics.jsonl": sound_metrics,
    "evals.jsonl": sound_evaluation,
    "rollouts.jsonl": sound_record,
}
"""The logs, and which records of them are sound."""


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._ownership: Ownership | None = None
        self._unbegun: int | None = None
        """Time of the `run.json` of a run that finished no step, and that a new one may replace."""

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @contextmanager
    def owned(self, notify: Callable[[str], None]) -> Iterator[None]:
        """Be the only process that writes here, or be refused with the name of the one that does."""
        with owned(self.path, notify) as self._ownership:
            try:
                yield
            finally:
                self._ownership = None

    @property
    def shared_lock(self) -> list[int]:
        """For a job that writes here on its own: the lock's descriptor. The directory stays in use until the job ends, too."""
        return [] if self._ownership is None else [self._ownership.descriptor]

    def check_resumable(self, engine: str) -> None:
        """Refuse the run of another engine, or one that is being trained: before any model is loaded."""
        if (trained := self.engine) != engine:
            option = f"--engine {trained} --resume" if trained != "local" else "--resume alone"
            raise RunError(f"{self.path} is trained by the {trained} engine: continue it with {option}")
        refuse_owned(self.path)

    def check_free(self) -> str:
        """Refuse a directory that holds a run, or that cannot be made (nothing is made yet).

        A run that finished no step holds nothing: it was refused late, or stopped early, and must not block its own
        correction. Returns what is to be said of it, else "".
        """
        note, about = "", self.path / "run.json"
        if about.exists():
            if self._ownership is None:
                refuse_owned(self.path)
            if not self._has_no_step():
                raise RunError(
                    f"{self.path} holds a run already: continue it with --resume, or choose another directory with --out"
                )
            self._unbegun = about.stat().st_mtime_ns
            note = f"{self.path} held a run that finished no step: it is begun anew"
        nearest = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise RunError(f"cannot make the run directory {self.path}: {nearest} is not a folder that you can write to")
        return note

    def _has_no_step(self) -> bool:
        """Whether a run was created here, and nothing of a training step was kept."""
        try:
            whole = isinstance(json.loads((self.path / "run.json").read_text(encoding="utf-8")), dict)
            metrics = self.path / "metrics.jsonl"
            saved = [one for folder in (self.checkpoints, self.path / "verl" / "checkpoints") for one in folder.glob("*")]
            return whole and not saved and not (metrics.exists() and metrics.stat().st_size)
        except (OSError, ValueError, RecursionError):
            return False

    def create(self, config: Config, data: str, engine: str = "local", more: Mapping[str, Any] | None = None) -> None:
        """Start a new run; refuses a directory that holds one. `more` is what else `run.json` is to keep."""
        seen = self._unbegun
        if self.check_free():
            if seen != self._unbegun:  # of somebody who came in between
                raise RunError(f"{self.path} holds a run already, begun a moment ago: choose another directory with --out")
            for name in (*LOGS, "prompts.json"):
                (self.path / name).unlink(missing_ok=True)
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make the run directory {self.path}: {error.strerror}; choose another with --out") from None
        self._replace("config.toml", config_toml(config))
        about = {"format": FORMAT, "iwopd": iwopd.__version__, "data": data}
        if engine != "local":
            about["engine"] = engine
        self._replace("run.json", json.dumps({**about, **(more or {})}, indent=2) + "\n")

    def check_resume(self, config: Config, data: str, *, allow_changes: bool) -> None:
        """Refuse to continue with other settings or other data, naming what differs."""
        about, old = self.about(), self.config()
        changed = differences(old, config, "place")
        if "progress" not in old.method.made.needs:  # else its weights depend on how long the run is
            changed.pop("steps", None)
        changes = [f"{name}: {_shown(before, after)}" for name, (before, after) in changed.items()]
        if about.get("data") != data:
            changes.append(f"training prompts: fingerprint {about.get('data')} -> {data}")
        if changes and not allow_changes:
            listed = "\n  ".join(changes)
            raise RunError(
                f"{self.path} was started with other settings:\n  {listed}\n"
                "Resume with the old ones, start a new run with --out, or insist with --allow-changes"
            )
        self._replace("config.toml", config_toml(config))
        self._replace("run.json", json.dumps({**about, "data": data}, indent=2) + "\n")

    def about(self) -> dict[str, Any]:
        return Run(self.path).about

    @property
    def engine(self) -> str:
        """Who trains it: `local`, or `verl`."""
        return str(self.about().get("engine", "local"))

    def config(self) -> Config:
        return load_config(self.path / "config.toml", saved=True)

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Add a line to one of the logs, as one write."""
        if self._ownership is not None:
            self._ownership.check()
        line = json.dumps(_plain(record), allow_nan=False) + "\n"
        try:
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise RunError(
                f"cannot write to {self.path / name}: {error.strerror}. Checkpoints are as they were: make room, then --resume"
            ) from None

    def read(self, name: str) -> Iterator[dict[str, Any]]:
        return read_log(self.path / name)

    def rewind(self, step: int, notify: Callable[[str], None]) -> None:
        """Drop log records after `step`: a resumed run will write them again. Damaged lines are set aside, with a message."""
        for name, is_sound in LOGS.items():
            path = self.path / name
            if not path.exists():
                continue
            kept, damaged = split_lines(path, is_sound)
            if damaged:
                aside = set_aside(path, damaged)
                numbers = listed([number for number, _ in damaged])
                notify(f"{path}: damaged lines ({numbers}) were moved to {aside.name}, and the run goes on without them")
            self._replace(name, b"".join(line for line, record in kept if record["step"] <= step).decode())

    def _replace(self, name: str, text: str) -> None:
        try:
            write_atomic(self.path / name, text)
        except OSError as error:
            raise RunError(f"cannot write {self.path / name}: {error.strerror or error}. It is as it was: {_REMEDY}") from None


_REMEDY = "make room, or give yourself write access, and try again"


def _shown(before: Any, after: Any) -> str:
    """Two values of a setting; of long texts (a chat template) the place where they part."""
    words = [repr(before), repr(after)]
    if max(map(len, words)) > LONG and isinstance(before, str) and isinstance(after, str):
        pairs = enumerate(zip(before, after, strict=False))
        place = next((i for i, (one, other) in pairs if one != other), min(len(before), len(after)))
        words = [f"{text[max(0, place - 20) : place + 40]!r} ({len(text):,} letters)" for text in (before, after)]
        return f"another text from letter {place + 1:,} on: {words[0]} -> {words[1]}"
    return " -> ".join(word if len(word) <= LONG else f"{word[:LONG]}... ({len(word):,} letters)" for word in words)


def _plain(value: Any) -> Any:
    """JSON has no NaN: it becomes null."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
