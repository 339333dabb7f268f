"""The folder of one checkpoint: writing all its files, checking them, reading them.

    model/                    what save_pretrained writes: weights, config, tokenizer (or the adapter alone); README.md
    optimizer.safetensors     optimizer.json (with float32 copies of weights in half precision)
    average.safetensors       the moving average of the weights, where a run keeps one (`average`)
    rng.safetensors           rng.json   state.json
    manifest.json             size and SHA-256 of every file above

Checkpoints of another engine (`cluster/verl`) are adopted as weights alone: `model/`, state.json and a manifest that says so.
safetensors does not detect a flipped bit, so a checkpoint is used only if every file matches the manifest.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from torch import nn
from torch.optim import Optimizer

from iwopd.filesystem import follow_umask, read_json, sha256, sync
from iwopd.train.average import TENSORS as AVERAGE
from iwopd.train.average import Average
from iwopd.train.checkpoint_optimizer import TENSORS, VALUES, Masters, load_optimizer
from iwopd.train.checkpoint_state import CheckpointError, load_weights, restore_rng

FORMAT_VERSION = 1
"""Raise it when the files of a checkpoint change their meaning."""
MANIFEST = "manifest.json"
CONFIGS = ("model/config.json", "model/adapter_config.json")
"""Of a whole model or of an adapter: one of them must exist."""
REQUIRED = (TENSORS, VALUES, "rng.safetensors", "rng.json", "state.json")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint whose files were complete and unchanged when it was opened."""

    path: Path
    step: int
    state: Mapping[str, Any]
    """The `state` given to `save`, as JSON returns it: tuples have become lists."""

    @property
    def model_path(self) -> Path:
        return self.path / "model"

    def load_model_weights(self, model: nn.Module) -> None:
        load_weights(self.model_path, model)

    def load_optimizer(self, optimizer: Optimizer, masters: Masters | None = None) -> None:
        """`masters` are float32 copies of weights in half precision, which get their values, too."""
        load_optimizer(self.path, optimizer, masters)

    def load_average(self, average: Average) -> bool:
        """Whether it has one: a run that was continued with other settings may not have kept any yet."""
        if not (self.path / AVERAGE).exists():
            return False
        average.load(self.path)
        return True

    def restore_rng(self) -> None:
        restore_rng(self.path)


def write_weights(folder: Path, step: int, model: Path, state: Mapping[str, Any]) -> None:
    """A checkpoint of weights alone: the files of a `from_pretrained` folder, hard-linked if possible."""
    for path in sorted(path for path in model.rglob("*") if path.is_file()):
        target = folder / "model" / path.relative_to(model)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, target)
        except OSError:  # another file system
            shutil.copyfile(path, target)
    seal(folder, step, state, weights_only=True)


def seal(folder: Path, step: int, state: Mapping[str, Any], **about: Any) -> None:
    """Write the state and the manifest, and sync everything to disk."""
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if not path.stat().st_nlink > 1:  # else it is another engine's own file
            follow_umask(path)
        sync(path)
        files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": sha256(path)}
    manifest = {"format": "iwopd checkpoint", "version": FORMAT_VERSION, "step": step, **about, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    sync(folder / MANIFEST)
    for path in folder.rglob("*"):
        if path.is_dir():
            sync(path)
    sync(folder)


def read_checkpoint(folder: Path, step: int) -> Checkpoint:
    return Checkpoint(folder, step, read_json(folder / "state.json"))


def damage(folder: Path, step: int) -> str | None:
    """What is wrong with a checkpoint, or None. One that cannot be judged (no access, a newer format) is an error."""
    try:
        manifest = read_json(folder / MANIFEST)
        version, written_step = manifest["version"], manifest["step"]
        files = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except PermissionError as error:
        raise _unreadable(folder, error) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__}: {error})"
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CheckpointError(
            f"checkpoint {folder} has format {version}, this version of iwopd reads up to {FORMAT_VERSION}: update iwopd, "
            "or move the checkpoint elsewhere to continue from an older one"
        )
    if version != FORMAT_VERSION or written_step != step:
        return f"{MANIFEST} is of format {version!r} and step {written_step!r}, not of format {FORMAT_VERSION} and step {step}"
    required = ("state.json",) if manifest.get("weights_only") else REQUIRED
    for name in (*([] if files.keys() & set(CONFIGS) else CONFIGS[:1]), *required):
        if name not in files:
            return f"{MANIFEST} does not list {name}"
    try:
        for name, (size, _) in files.items():
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                return f"{MANIFEST} lists {name}, which is outside the checkpoint"
            if not (folder / name).is_file():
                return f"{name} is missing"
            if (found := (folder / name).stat().st_size) != size:
                return f"{name} has {found} bytes, the manifest says {size}"
        for name, (_, digest) in files.items():
            if (computed := sha256(folder / name)) != digest:
                return f"{name} has SHA-256 {computed[:12]}..., the manifest says {digest[:12]}..."
    except PermissionError as error:
        raise _unreadable(folder, error) from error
    except OSError as error:
        return f"{name} cannot be read ({error})"
    return None


def refuse_strangers(folder: Path) -> None:
    """Raise for files that the manifest does not list: weights, a config or code among them would be loaded, too."""
    listed = read_json(folder / MANIFEST)["files"]
    there = (path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())
    hidden = re.compile(r"\.(?!.*\.safetensors$)")  # a file manager's, or a network disk's; nobody loads them
    names = sorted(path.as_posix() for path in there if not hidden.match(path.name))
    if strangers := [name for name in names if name not in listed and name != MANIFEST]:
        more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
        raise CheckpointError(
            f"checkpoint {folder} holds {strangers[0]}{more}, which its {MANIFEST} does not list: it could take the place of "
            "what was trained. Move it elsewhere"
        )


def _unreadable(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"no permission to read checkpoint {folder} ({error}): it may be intact, so give yourself access to it"
    )
