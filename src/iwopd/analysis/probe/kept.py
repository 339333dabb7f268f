"""What a probe has measured so far, kept beside its result, so that one that was stopped goes on where it was.

    probe.json.parts/identity       what all of it belongs to: models, prompts, settings
    probe.json.parts/rollouts.json  the student's answers
    probe.json.parts/handoff.json   the hand-off curve
    probe.json.parts/numbers.jsonl  a line for each cosine, as soon as it is known
    probe.json.parts/NAME.safetensors  sketches of updates, a file for each batch

Everything else takes a pass or two over the rollouts, and is measured again. The folder goes when the result is written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import iwopd
from iwopd.analysis.probe.inputs import Material, Pair
from iwopd.analysis.probe.settings import ProbeSettings
from iwopd.filesystem import make_directory, read_json, sync, write_atomic
from iwopd.runs.owner import FILE as OWNER
from iwopd.types import Prompt, Rollout

log = logging.getLogger(__name__)
FREE = ("skip", "bins")
"""Settings that decide nothing of what is kept."""


class Kept:
    """What is known already. Without a folder nothing is kept."""

    def __init__(self, folder: Path | None = None, identity: str = "") -> None:
        """What a folder holds of another probe is thrown away."""
        self._folder = folder
        if folder is None:
            self.numbers: MutableMapping[str, float] = {}
            return
        mark = folder / "identity"
        make_directory(folder)
        if not mark.is_file() or mark.read_bytes() != identity.encode():
            _empty(folder)
            write_atomic(mark, identity)
        self.numbers = _Lines(folder / "numbers.jsonl")

    def read(self, name: str) -> Any:
        """A part as it was kept; None if it was not."""
        path = None if self._folder is None else self._folder / f"{name}.json"
        if path is None or not path.is_file():
            return None
        try:
            found = read_json(path)
            if found["sha256"] == _digest(found["value"]):
                return found["value"]
        except (ValueError, RecursionError, KeyError, TypeError):
            pass
        log.warning("%s is damaged: what it held is measured again", path)
        return None

    def write(self, name: str, value: Any) -> None:
        if self._folder is not None:
            write_atomic(self._folder / f"{name}.json", json.dumps({"sha256": _digest(value), "value": value}))

    def tensors(self, name: str) -> dict[str, Tensor] | None:
        path = None if self._folder is None else self._folder / f"{name}.safetensors"
        if path is None or not path.is_file():
            return None
        try:
            return load_file(path)
        except SafetensorError:  # the machine went down while it was written
            return None

    def keep_tensors(self, name: str, values: Mapping[str, Tensor]) -> None:
        if self._folder is not None:
            path = self._folder / f"{name}.safetensors"
            draft = path.with_name(f".tmp-{path.name}-{os.getpid()}")
            save_file({key: value.contiguous().clone() for key, value in values.items()}, draft)
            sync(draft)
            draft.replace(path)


class _Lines(MutableMapping[str, float]):
    """Numbers by name in a file, to which each new one is added at once."""

    def __init__(self, path: Path) -> None:
        self._path, self._known = path, dict[str, float]()
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        sound = []
        for line in lines:
            if (pair := _pair(line)) is not None:
                self._known[pair[0]] = pair[1]
                sound.append(line)
        if damaged := sum(line not in sound for line in lines if line.endswith(b"\n")):
            log.warning("%s: %d damaged lines are left out, and what they held is measured again", path, damaged)
        if len(sound) < len(lines):
            write_atomic(path, b"".join(sound).decode())

    def __setitem__(self, name: str, value: float) -> None:
        self._known[name] = value
        with self._path.open("ab") as file:
            file.write(json.dumps([name, value]).encode() + b"\n")

    def __getitem__(self, name: str) -> float:
        return self._known[name]

    def __delitem__(self, name: str) -> None:
        raise TypeError("what was measured stays")

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _pair(line: bytes) -> tuple[str, float] | None:
    """Name and number of a line; None: it was stopped while it wrote, or it is damaged."""
    try:
        found = json.loads(line.decode()) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    if not (isinstance(found, list) and len(found) == 2 and isinstance(found[0], str) and type(found[1]) in (int, float)):
        return None
    try:
        return found[0], float(found[1])
    except OverflowError:  # JSON's whole numbers have no limit
        return None


def _empty(folder: Path) -> None:
    """All but the mark of the process that works here."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != OWNER:
            path.unlink()


def identity_of(pair: Pair, material: Material, settings: ProbeSettings) -> str:
    """Changes with anything that the numbers depend on: weights, prompts, solutions, settings, the version of this package."""
    chosen = {name: value for name, value in settings.as_dict().items() if name not in FREE}
    chosen["agreement"] = "agreement" in settings.skip  # where the rule `gated` stands
    about: list[Any] = [iwopd.__version__, torch.get_num_threads(), pair.student_name, pair.teacher_name, material.task, chosen]
    about += [[prompt.id, prompt.token_ids, prompt.answer] for prompt in material.prompts]
    about.append(sorted((id_, list(ids)) for id_, ids in material.solutions.items()))
    for model in (pair.student, pair.teacher):
        about.append(
            [
                [str(weight.dtype), str(weight.device), float(weight.detach().sum(dtype=torch.float64))]
                for weight in model.parameters()
            ]
        )
    return hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()


def rollouts_as_json(rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": rollout.prompt.id,
            "ids": rollout.response_ids.tolist(),
            "logprobs": rollout.rollout_logprobs.tolist(),
            "dtype": str(rollout.rollout_logprobs.dtype).removeprefix("torch."),
            "stop_reason": rollout.stop_reason,
            "sample": rollout.sample,
        }
        for rollout in rollouts
    ]


def rollouts_from_json(found: Sequence[Mapping[str, Any]], prompts: Sequence[Prompt]) -> list[Rollout]:
    by_id = {prompt.id: prompt for prompt in prompts}
    return [
        Rollout(
            by_id[one["prompt"]],
            torch.tensor(one["ids"], dtype=torch.long),
            torch.tensor(one["logprobs"], dtype=getattr(torch, one["dtype"])),
            one["stop_reason"],
            one["sample"],
        )
        for one in found
    ]
