"""The run directory as a run writes it; `reading` reads it.

    run.json          format version, version of iwopd, fingerprint of the data
    config.toml       the resolved settings
    metrics.jsonl     one object per step
    evals.jsonl       one object per evaluation
    prompts.json      how prompts are rendered, and three of them
    rollouts.jsonl    a few rollouts of each evaluation, token by token
    checkpoints/      see `train.checkpoint`

`docs/run-directory.md` has the fields.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import iwopd
from iwopd.config import Config, config_toml, differences, load_config
from iwopd.filesystem import write_atomic
from iwopd.runs.logs import RunError, read_log
from iwopd.runs.reading import FORMAT, Run

LONG = 300
"""Letters of a changed setting that are shown."""
LOGS = ("metrics.jsonl", "evals.jsonl", "rollouts.jsonl")


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def check_free(self) -> None:
        """Refuse a directory that holds a run, or that cannot be made (nothing is made yet)."""
        if (self.path / "run.json").exists():
            raise RunError(
                f"{self.path} holds a run already: continue it with --resume, or choose another directory with --out"
            )
        nearest = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise RunError(f"cannot make the run directory {self.path}: {nearest} is not a folder that you can write to")

    def create(self, config: Config, data: str, engine: str = "local") -> None:
        """Start a new run; refuses a directory that holds one."""
        self.check_free()
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make the run directory {self.path}: {error.strerror}; choose another with --out") from None
        write_atomic(self.path / "config.toml", config_toml(config))
        about = {"format": FORMAT, "iwopd": iwopd.__version__, "data": data}
        if engine != "local":
            about["engine"] = engine
        write_atomic(self.path / "run.json", json.dumps(about, indent=2) + "\n")

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
        write_atomic(self.path / "config.toml", config_toml(config))
        write_atomic(self.path / "run.json", json.dumps({**about, "data": data}, indent=2) + "\n")

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

    def rewind(self, step: int) -> None:
        """Drop log records after `step`: a resumed run will write them again."""
        for name in LOGS:
            if (self.path / name).exists():
                kept = [json.dumps(record) + "\n" for record in self.read(name) if record["step"] <= step]
                write_atomic(self.path / name, "".join(kept))


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
