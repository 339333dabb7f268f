"""Checkpoints that survive `kill -9`, a full disk and a flipped bit.

    <directory>/step-000010/   model/                    what save_pretrained writes: weights, config, tokenizer
                               optimizer.safetensors     optimizer.json
                               rng.safetensors           rng.json   state.json
                               manifest.json             size and SHA-256 of every file above
                protected.json                           steps that retention must leave alone
                damaged-step-000010/                     set aside, never deleted
                .tmp-...                                 unfinished work; goes away when its process is dead

A checkpoint is written under another name, forced to the disk, and renamed when it is whole: under its own name there is all
of it or nothing. safetensors loads a flipped bit without a word, so every file is checked against the manifest before a
checkpoint is used, and before an older one is deleted in its favour. There is no pickle, so reading a checkpoint runs no code.

Needs a POSIX system. Several stores, in one process or many, may share a directory: what changes it happens under a lock that
the system frees when its owner dies. Where the file system has no locks (some network ones), let only one process write.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)
JSON: TypeAlias = "str | int | float | bool | Sequence[JSON] | Mapping[str, JSON] | None"

FORMAT_VERSION = 1
"""Raise it when the files of a checkpoint change their meaning."""
MANIFEST = "manifest.json"
_MODEL, _OPTIMIZER, _RNG, _STATE, _PROTECTED = "model", "optimizer", "rng", "state.json", "protected.json"
_REQUIRED = ("model/config.json", "optimizer.safetensors", "optimizer.json", "rng.safetensors", "rng.json", _STATE)
_STEP = re.compile(r"step-(\d{6,})")
_TEMPORARY = re.compile(r"\.tmp-(?P<kind>deleted-|replaced-|)(?P<name>step-\d{6,})-(?P<pid>\d+)(-\d+)?")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # how libraries written in Rust report what the system said


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or does not fit what it is loaded into."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint whose files were all there and unchanged when it was opened."""

    path: Path
    step: int
    state: Mapping[str, Any]
    """What the caller gave to `save`, as JSON returns it: tuples have become lists."""

    @property
    def model_path(self) -> Path:
        """For `from_pretrained`."""
        return self.path / _MODEL

    def load_model_weights(self, model: nn.Module) -> None:
        """Copy the weights into `model`, bit for bit. Names, shapes and dtypes must agree, or nothing is touched."""
        saved = {name: tensor for file in _weight_files(self.model_path) for name, tensor in load_file(file).items()}
        targets = _targets(model, saved, where=str(self.model_path))
        for name, tensor in saved.items():
            target = targets[name]
            if target.shape != tensor.shape or target.dtype != tensor.dtype:
                raise CheckpointError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)} in {self.model_path}, but {target.dtype} "
                    f"{list(target.shape)} in the model: build the model as it was when the checkpoint was saved"
                )
        with torch.no_grad():
            for name, tensor in saved.items():
                targets[name].copy_(tensor)

    def load_optimizer(self, optimizer: Optimizer) -> None:
        """Give `optimizer` the saved hyperparameters and state, each tensor in the dtype it was saved in."""
        where = self.path / f"{_OPTIMIZER}.json"
        saved = _read_json(where)
        _check_optimizer(saved, _describe_optimizer(optimizer), where)
        mapped = load_file(self.path / f"{_OPTIMIZER}.safetensors")
        tensors = {name: tensor.clone() for name, tensor in mapped.items()}  # not backed by the file, which may be deleted
        state = {int(index): _from_json(values, tensors) for index, values in saved["state"].items()}
        optimizer.load_state_dict({"state": state, "param_groups": _from_json(saved["param_groups"], tensors)})
        # torch casts floating-point state to the dtype of its parameter, which loses bits where the state was wider.
        for index, parameter in enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]):
            for key, value in state.get(index, {}).items():
                loaded = optimizer.state[parameter][key]
                if isinstance(value, Tensor) and loaded.dtype != value.dtype:
                    optimizer.state[parameter][key] = value.to(loaded.device)

    def restore_rng(self) -> None:
        """Set the global random generators of torch, Python and numpy to where they stood at the save."""
        values = _read_json(self.path / f"{_RNG}.json")
        tensors = load_file(self.path / f"{_RNG}.safetensors")
        torch.set_rng_state(tensors["torch"])
        version, internal, gauss_next = values["python"]
        random.setstate((version, tuple(internal), gauss_next))
        if values["numpy"] is not None:
            import numpy as np

            np.random.set_state(values["numpy"])
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if devices != values["cuda_devices"]:
            log.warning(
                "%s holds the random state of %d CUDA devices, here are %d: the run goes on, but not with the same numbers",
                self.path,
                values["cuda_devices"],
                devices,
            )
        for device in range(min(devices, values["cuda_devices"])):
            torch.cuda.set_rng_state(tensors[f"cuda.{device}"], device)


class CheckpointStore:
    """The checkpoints of one run.

    `keep` newest ones stay, and those under `protect`. `notify` hears what a user must know: damage and what was done
    about it.
    """

    def __init__(self, directory: Path, *, keep: int = 2, notify: Callable[[str], None] = log.warning) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.directory = Path(directory)
        self.keep = keep
        self._notify = notify
        if self.directory.is_dir():
            with _locked(self.directory):
                self._sweep()

    # --- writing ----------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        *,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        optimizer: Optimizer,
        state: Mapping[str, JSON],
    ) -> Path:
        """Write the checkpoint of `step` and return its folder; when this returns, it is on the disk.

        A valid checkpoint of the same step is replaced. Older ones beyond `keep` are deleted once the new one stands;
        those of later steps are left alone. On any error the checkpoints that were there stay as they were.
        """
        name = _name(step)
        plain_state = _plain("state", state)
        _check_unwrapped(model)
        needed = _size(model, optimizer)
        with ExitStack() as stack:
            draft: Path | None = None
            try:
                _make_directory(self.directory)
                with _locked(self.directory):
                    self._sweep()
                    draft = self._temporary("", name)
                    draft.mkdir()
                    stack.enter_context(_locked(draft))  # held until the end: says "alive" where a process id cannot
                _write(draft, step, model, tokenizer, optimizer, plain_state)
                with _locked(self.directory):
                    self._put_in_place(draft, name)
                    self._retain(step)
            except BaseException as error:
                if draft is not None:
                    shutil.rmtree(draft, ignore_errors=True)
                cause = _system_error(error)
                if cause is None:
                    raise
                raise CheckpointError(_failure(step, self.directory, cause, needed)) from error
        return self.directory / name

    def protect(self, checkpoint: int | str) -> None:
        """Keep this checkpoint (step or folder name) from retention, for instance because it is the best one yet."""
        step = _step(checkpoint)
        if step not in self.steps():
            raise CheckpointError(f"cannot protect step {step}: {self.directory} has checkpoints of steps {self.steps()}")
        self._change_protected(lambda steps: steps | {step})

    def unprotect(self, checkpoint: int | str) -> None:
        """Leave this checkpoint to retention again; it goes at a later save, when it is no longer among the newest."""
        self._change_protected(lambda steps: steps - {_step(checkpoint)})

    # --- reading ----------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps of the checkpoints there are, ascending, unchecked."""
        if not self.directory.is_dir():
            return []
        found = (_STEP.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match in found if match and _name(int(match[1])) == match[0])

    def protected(self) -> frozenset[int]:
        """Steps that retention leaves alone."""
        path = self.directory / _PROTECTED
        try:
            return frozenset(int(step) for step in _read_json(path)["steps"])
        except FileNotFoundError:
            return frozenset()
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}): repair it, or delete it and protect anew") from error

    def latest(self) -> Checkpoint | None:
        """The newest valid checkpoint; None if there is none. Damaged ones on the way are moved aside, with a message."""
        if not self.directory.is_dir():
            return None
        with _locked(self.directory):
            self._sweep()
            for step in reversed(self.steps()):
                path = self.directory / _name(step)
                problem = _damage(path, step)
                if problem is None:
                    return Checkpoint(path, step, _read_json(path / _STATE))
                self._set_aside(path, problem)
        return None

    def open(self, checkpoint: int | str) -> Checkpoint:
        """One checkpoint by step or folder name, checked."""
        step = _step(checkpoint)
        path = self.directory / _name(step)
        if step not in self.steps():
            raise CheckpointError(f"there is no checkpoint of step {step}: {self.directory} has steps {self.steps()}")
        with _locked(self.directory):
            problem = _damage(path, step)
            if problem is not None:
                raise CheckpointError(f"checkpoint {path} is damaged: {problem}. Use another one: {self.steps()}")
            return Checkpoint(path, step, _read_json(path / _STATE))

    # --- under the directory's lock ---------------------------------------------------------------------------------

    def _temporary(self, kind: str, name: str) -> Path:
        """A free name for unfinished work of this process."""
        path = self.directory / f".tmp-{kind}{name}-{os.getpid()}"
        return path if not _exists(path) else _first_free(path)

    def _sweep(self) -> None:
        """Remove what dead processes left unfinished; a checkpoint that was being replaced comes back."""
        for path in sorted(self.directory.glob(".tmp-*")):
            match = _TEMPORARY.fullmatch(path.name)
            try:
                if path.name == f".tmp-{_PROTECTED}":
                    path.unlink()  # its writer would hold the lock that we hold
                elif match is not None and not _alive(int(match["pid"])):
                    self._clear(path, match)
            except OSError as error:
                self._notify(f"cannot clear the unfinished checkpoint {path}: {error}. It does no harm but takes space")

    def _clear(self, path: Path, match: re.Match[str]) -> None:
        original = self.directory / match["name"]
        with _locked(path, wait=False) as free:
            if not free:  # the owner lives after all: another thread, or a process in another container or machine
                return
            if match["kind"] == "replaced-" and not _exists(original):
                path.rename(original)
            else:
                _remove(path)

    def _put_in_place(self, draft: Path, name: str) -> None:
        """Rename the finished draft. A folder cannot be renamed onto a full one, so what stands there goes first."""
        target = self.directory / name
        old: Path | None = None
        if _exists(target):
            problem = _damage(target, _step(name))
            if problem is not None:
                self._set_aside(target, problem, must=True)
            else:
                old = self._temporary("replaced-", name)
                target.rename(old)
        try:
            draft.rename(target)
        except BaseException:
            if old is not None and not _exists(target):
                old.rename(target)
            raise
        _sync(self.directory)
        if old is not None:
            self._delete(old)

    def _retain(self, newest: int) -> None:
        """Delete checkpoints older than `newest` beyond `keep`, counting only those whose files are whole.

        The new one stands already, so trouble here is reported and does not fail the save.
        """
        older = [step for step in reversed(self.steps()) if step < newest]
        if len(older) < self.keep:
            return
        kept = 1
        try:
            protected = self.protected()
            for step in older:
                path = self.directory / _name(step)
                if kept >= self.keep:
                    if step not in protected:
                        self._delete(path)
                elif (problem := _damage(path, step)) is None:
                    kept += 1
                else:
                    self._set_aside(path, problem)
        except (OSError, CheckpointError) as error:
            self._notify(f"old checkpoints in {self.directory} were not all deleted: {error}")

    def _delete(self, path: Path) -> None:
        """Rename first, so that a half-deleted checkpoint is never taken for one."""
        match = _TEMPORARY.fullmatch(path.name)
        trash = self._temporary("deleted-", match["name"] if match else path.name)
        try:
            path.rename(trash)
            _remove(trash)
        except OSError as error:
            self._notify(f"cannot delete the old checkpoint {path}: {error}. Delete it by hand if space runs short")

    def _set_aside(self, path: Path, problem: str, *, must: bool = False) -> None:
        aside = path.with_name(f"damaged-{path.name}")
        if _exists(aside):
            aside = _first_free(aside)
        try:
            path.rename(aside)
            _sync(self.directory)
        except OSError as error:
            if must:
                raise
            self._notify(f"checkpoint {path} is damaged: {problem}. It is passed over; moving it aside failed: {error}")
        else:
            self._notify(f"checkpoint {path} is damaged: {problem}. It was moved to {aside.name} and is not used")

    def _change_protected(self, change: Callable[[frozenset[int]], frozenset[int]]) -> None:
        if not self.directory.is_dir():
            return
        path = self.directory / _PROTECTED
        draft = self.directory / f".tmp-{_PROTECTED}"
        with _locked(self.directory):
            steps = sorted(change(self.protected()))
            try:
                _write_json(draft, {"steps": steps})
                _sync(draft)
                draft.replace(path)
                _sync(self.directory)
            except OSError as error:
                draft.unlink(missing_ok=True)
                raise CheckpointError(f"cannot write {path}: {error}. The steps protected before still are") from error


# --- the files of a checkpoint --------------------------------------------------------------------------------------


def _write(
    draft: Path,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    optimizer: Optimizer,
    state: Mapping[str, Any],
) -> None:
    """All files, forced to the disk, the manifest last."""
    _write_rng(draft)  # first: nothing after it may draw a random number that the resumed run would not
    folder = draft / _MODEL
    with _no_progress_bars():
        # The model's own tensor names, not those of an older file layout: so they go back in without conversion.
        model.save_pretrained(folder, save_original_format=False)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    written = [name for file in _weight_files(folder) for name in _tensor_names(file)]
    _targets(model, written, where="what save_pretrained wrote")  # what could not be loaded again must fail now, not then
    _write_optimizer(draft, optimizer)
    _write_json(draft / _STATE, state)
    files = {}
    for path in sorted(path for path in draft.rglob("*") if path.is_file()):
        _sync(path)
        files[path.relative_to(draft).as_posix()] = {"size": path.stat().st_size, "sha256": _sha256(path)}
    manifest = {"format": "iwopd checkpoint", "version": FORMAT_VERSION, "step": step, "files": files}
    _write_json(draft / MANIFEST, manifest, indent=1)
    _sync(draft / MANIFEST)
    for path in draft.rglob("*"):
        if path.is_dir():
            _sync(path)
    _sync(draft)


def _damage(path: Path, step: int) -> str | None:
    """What is wrong with a checkpoint, in a few words; None if every file is as it was written."""
    try:
        manifest = _read_json(path / MANIFEST)
        version, written_step, files = manifest["version"], manifest["step"], manifest["files"]
        sizes = {str(name): int(entry["size"]) for name, entry in files.items()}
        digests = {str(name): str(entry["sha256"]) for name, entry in files.items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except PermissionError as error:
        raise _unreadable(path, error) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__}: {error})"
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CheckpointError(
            f"checkpoint {path} has format {version}, this version of iwopd reads up to {FORMAT_VERSION}: update iwopd, "
            "or move the checkpoint elsewhere to go on from an older one"
        )
    if version != FORMAT_VERSION or written_step != step:
        return f"{MANIFEST} is of format {version!r} and step {written_step!r}, not of format {FORMAT_VERSION} and step {step}"
    for name in _REQUIRED:
        if name not in sizes:
            return f"{MANIFEST} does not list {name}"
    try:
        for name, size in sizes.items():
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                return f"{MANIFEST} lists {name}, which is outside the checkpoint"
            if not (path / name).is_file():
                return f"{name} is missing"
            if (found := (path / name).stat().st_size) != size:
                return f"{name} has {found} bytes, the manifest says {size}"
        for name, digest in digests.items():
            if (computed := _sha256(path / name)) != digest:
                return f"{name} has SHA-256 {computed[:12]}..., the manifest says {digest[:12]}..."
    except PermissionError as error:
        raise _unreadable(path, error) from error
    except OSError as error:
        return f"{name} cannot be read ({error})"
    return None


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"no permission to read checkpoint {path} ({error}): it may be sound, so give yourself access to it")


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _tensor_names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def _targets(model: nn.Module, names: Iterable[str], *, where: str) -> dict[str, Tensor]:
    """The model's tensor for each saved name. Every tensor of the model must be met exactly once, tied ones as one."""
    live: dict[str, Tensor] = model.state_dict(keep_vars=True)
    names = list(names)
    if unknown := [name for name in names if name not in live]:
        raise CheckpointError(f"{where} has {len(unknown)} tensors that the model has not, first of all {unknown[0]}")
    met: dict[object, str] = {}
    for name in names:
        other = met.setdefault(_memory(live[name]), name)
        if other != name:
            raise CheckpointError(f"{where} has both {other} and {name}, which the model ties: build it with untied weights")
    if missing := [name for name in live if _memory(live[name]) not in met]:
        raise CheckpointError(
            f"{where} lacks {len(missing)} tensors of the model, first of all {missing[0]}: the checkpoint is of another "
            "model, of one that ties these weights, or of an adapter alone (only whole models can be saved)"
        )
    return {name: live[name] for name in names}


def _memory(tensor: Tensor) -> object:
    """The same for tied tensors, different for others."""
    if tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()


def _write_optimizer(draft: Path, optimizer: Optimizer) -> None:
    """Tensors, the step counters too, to safetensors; all else to JSON. Parameters are known by their place, 0, 1, ..."""
    tensors: dict[str, Tensor] = {}
    full = optimizer.state_dict()
    values = {
        **_describe_optimizer(optimizer),
        "state": {str(i): _to_json(f"state.{i}", entry, tensors) for i, entry in full["state"].items()},
        "param_groups": _to_json("param_groups", full["param_groups"], tensors),
    }
    save_file(_separate(tensors), draft / f"{_OPTIMIZER}.safetensors")
    _write_json(draft / f"{_OPTIMIZER}.json", values)


def _describe_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """What must agree between the optimizer that was saved and the one that is loaded into."""
    inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
    return {
        "class": type(inner).__name__,
        "shapes": [[list(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups],
    }


def _check_optimizer(saved: Mapping[str, Any], live: Mapping[str, Any], where: Path) -> None:
    if saved["class"] != live["class"]:
        raise CheckpointError(f"{where} is the state of {saved['class']}, the optimizer is {live['class']}: use the same one")
    if len(saved["shapes"]) != len(live["shapes"]):
        raise CheckpointError(
            f"{where} has {len(saved['shapes'])} parameter groups, the optimizer has {len(live['shapes'])}: "
            "build the groups as they were when the checkpoint was saved"
        )
    for group, (old, new) in enumerate(zip(saved["shapes"], live["shapes"], strict=True)):
        if len(old) != len(new):
            raise CheckpointError(
                f"parameter group {group} has {len(old)} parameters in {where}, {len(new)} in the optimizer: "
                "the same parameters must be trained"
            )
        for index, (before, now) in enumerate(zip(old, new, strict=True)):
            if before != now:
                raise CheckpointError(
                    f"parameter {index} of group {group} has shape {before} in {where}, {now} in the optimizer: "
                    "give it the parameters of the same model in the same order"
                )


def _to_json(name: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """`value` for JSON: tensors go to `tensors` and leave their name, tuples remain tuples."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, tuple):
        return {"tuple": [_to_json(f"{name}.{i}", item, tensors) for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [_to_json(f"{name}.{i}", item, tensors) for i, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value) and not value.keys() & {"tensor", "tuple"}:
        return {key: _to_json(f"{name}.{key}", item, tensors) for key, item in value.items()}
    if value is None or isinstance(value, str | int | float):
        return value
    raise CheckpointError(f"the optimizer's {name} is a {type(value).__name__}, which a checkpoint cannot hold: use another")


def _from_json(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `_to_json`."""
    if isinstance(value, list):
        return [_from_json(item, tensors) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"tensor"}:
            return tensors[value["tensor"]]
        if value.keys() == {"tuple"}:
            return tuple(_from_json(item, tensors) for item in value["tuple"])
        return {key: _from_json(item, tensors) for key, item in value.items()}
    return value


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, contiguous, none sharing memory with another: what safetensors demands."""
    result: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage()
        if storage.nbytes() != plain.nbytes or storage.data_ptr() in seen:
            plain = plain.clone()
        seen.add(plain.untyped_storage().data_ptr())
        result[name] = plain
    return result


def _write_rng(draft: Path) -> None:
    tensors = {"torch": torch.get_rng_state()}
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device in range(devices):
        tensors[f"cuda.{device}"] = torch.cuda.get_rng_state(device)
    numpy_state: Any = None
    if "numpy" in sys.modules:  # not imported: nobody can have drawn from it
        import numpy as np

        numpy_state = np.random.get_state(legacy=False)
        numpy_state["state"] = {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}
    save_file(tensors, draft / f"{_RNG}.safetensors")
    _write_json(draft / f"{_RNG}.json", {"python": random.getstate(), "numpy": numpy_state, "cuda_devices": devices})


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Without the bar that transformers draws for every save: the console is the caller's."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


# --- checks and messages --------------------------------------------------------------------------------------------


def _name(step: int) -> str:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step must be an integer of at least 0, got {step!r}")
    return f"step-{step:06d}"


def _step(checkpoint: int | str) -> int:
    if isinstance(checkpoint, int):
        return checkpoint
    match = _STEP.fullmatch(checkpoint)
    if match is None:
        raise ValueError(f"{checkpoint!r} is no checkpoint: give a step, or a folder name such as 'step-000010'")
    return int(match[1])


def _plain(name: str, value: object) -> Any:
    """`value` in the types that `json` writes; refuses what JSON would change or cannot hold."""
    if isinstance(value, Mapping):
        if strange := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"{name} has the key {strange[0]!r}: JSON would make it a string, so make it one")
        return {key: _plain(f"{name}[{key!r}]", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{name}[{index}]", item) for index, item in enumerate(value)]
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"{name} is a {type(value).__name__}, which JSON cannot hold: give numbers, strings, lists and dicts")


def _check_unwrapped(model: nn.Module) -> None:
    if not hasattr(model, "save_pretrained"):
        raise TypeError(f"the model is a {type(model).__name__} without save_pretrained: unwrap it before saving")


def _size(model: nn.Module, optimizer: Optimizer) -> int:
    """Bytes that the tensors of a checkpoint take, about what it needs."""
    weights = {_memory(tensor): tensor.nbytes for tensor in model.state_dict(keep_vars=True).values()}
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    return sum([*weights.values(), *(tensor.nbytes for tensor in state)])


def _system_error(error: BaseException) -> OSError | None:
    """The system's error, also out of exceptions of libraries that only quote its number; None if there is none."""
    if isinstance(error, OSError):
        return error
    match = None if isinstance(error, CheckpointError) else _OS_ERROR.search(str(error))
    return OSError(int(match[1]), os.strerror(int(match[1]))) if match else None


def _failure(step: int, directory: Path, cause: OSError, needed: int) -> str:
    try:
        free = f"{shutil.disk_usage(directory).free:,} are free"
    except OSError as error:
        free = f"how many are free is unknown ({error.strerror})"
    way_out = {
        errno.ENOSPC: "free some space there or put the run on another disk",
        errno.EDQUOT: "free some of your quota or put the run on another disk",
        errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
        errno.EROFS: "put the run on a disk that can be written",
        errno.EACCES: "give yourself write access or put the run elsewhere",
        errno.EPERM: "give yourself write access or put the run elsewhere",
    }.get(cause.errno or 0, "check the disk, or put the run on another one")
    return (
        f"cannot save the checkpoint of step {step} in {directory}: {cause.strerror or cause}. "
        f"It needs about {needed:,} bytes, {free}. Earlier checkpoints are as they were: {way_out}, then resume"
    )


# --- the file system ------------------------------------------------------------------------------------------------


@contextmanager
def _locked(directory: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock on a folder, which needs no file and no write access; false if `wait` is off and another holds it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        held = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            held = False
        except OSError as error:
            log.debug("no lock on %s: %s", directory, error)  # a file system without locks
        yield held
    finally:
        os.close(descriptor)


def _alive(pid: int) -> bool:
    """Whether another process of this id runs. This one's own unfinished work is told by its lock instead."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _make_directory(directory: Path) -> None:
    """Like `mkdir -p`, forced to the disk."""
    if not directory.is_dir():
        _make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        _sync(directory.parent)


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def _first_free(path: Path) -> Path:
    """`path` with the first suffix -2, -3, ... that nothing has."""
    number = 2
    while _exists(candidate := path.with_name(f"{path.name}-{number}")):
        number += 1
    return candidate


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _write_json(path: Path, value: object, *, indent: int | None = None) -> None:
    path.write_text(json.dumps(value, indent=indent), encoding="utf-8")
