"""The run directory: what a run leaves behind, and the interface that comparison, report and figures read.

    run.json          format version, version of iwopd, fingerprint of the data
    config.toml       the resolved settings
    metrics.jsonl     one object a step
    evals.jsonl       one object an evaluation
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
from iwopd.errors import UserError
from iwopd.filesystem import write_atomic

FORMAT = 1
LOGS = ("metrics.jsonl", "evals.jsonl", "rollouts.jsonl")
TEACHERS_PLACE = tuple(
    f"teacher.{name}"
    for name in ("urls", "api_key_env", "max_in_flight", "tokens_per_request", "request_timeout", "patience", "deadline")
)
"""Where the teacher is and how it is asked: a server may come back elsewhere."""
ENGINES_PLACE = tuple(
    f"engine.{name}"
    for name in (
        "server.url",
        "server.api_key_env",
        "server.weights_folder",
        "server.max_in_flight",
        "server.request_timeout",
        "server.patience",
        "vllm.memory_share",
        "vllm.sleep",
    )
)
"""Where an engine is and how it is run: a server may come back elsewhere."""
FREE_TO_CHANGE = (
    "tracking",
    "steps",
    "checkpoint",
    "cluster",  # the launcher refuses what its checkpoints cannot follow
    "eval.kept_rollouts",
    "rollout.overlap",
    *TEACHERS_PLACE,
    *ENGINES_PLACE,
)
"""Settings that a resumed run may change without becoming another run."""


class RunError(UserError, RuntimeError):
    """A run directory that cannot be used as asked, with the remedy."""


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
        about = self.about()
        old = self.config()
        scheduled = "progress" in old.method.made.needs  # its weights depend on how long the run is
        free = [name for name in FREE_TO_CHANGE if name != "steps" or not scheduled]
        changes = differences(old, config, ignore=free)
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
        try:
            about: dict[str, Any] = json.loads((self.path / "run.json").read_text())
        except FileNotFoundError:
            raise RunError(f"{self.path} is not a run directory (no run.json); start one with `iwopd train RECIPE`") from None
        except json.JSONDecodeError as error:
            raise RunError(f"{self.path / 'run.json'} is damaged: {error}") from None
        if about.get("format") != FORMAT:
            raise RunError(f"{self.path} has format {about.get('format')}, this version of iwopd reads format {FORMAT}")
        return about

    @property
    def engine(self) -> str:
        """Who trains it: `local`, or `verl`."""
        return str(self.about().get("engine", "local"))

    def config(self) -> Config:
        return load_config(self.path / "config.toml")

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
        """The records of a log; a last line that was cut off by a crash is left out."""
        path = self.path / name
        if not path.exists():
            return
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    yield json.loads(line)

    def rewind(self, step: int) -> None:
        """Drop log records after `step`: a resumed run will write them again."""
        for name in LOGS:
            if (self.path / name).exists():
                kept = [json.dumps(record) + "\n" for record in self.read(name) if record["step"] <= step]
                write_atomic(self.path / name, "".join(kept))


def _plain(value: Any) -> Any:
    """JSON has no NaN: it becomes null."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
