"""Checkpoints that survive `kill -9`, a full disk and a flipped bit.

    <directory>/step-000010/            one checkpoint, see `checkpoint_files`
                protected.json          steps that retention never deletes
                damaged-step-000010/    set aside, never deleted
                .tmp-...                unfinished work; removed when its process is dead

A checkpoint is written under a temporary name, synced to disk, and renamed when it is complete, so a `step-...` folder is never
partial. Every file is checked against a manifest before a checkpoint is used, and before an older one is deleted in
its favour.

Needs a POSIX system. Several stores, in one process or many, may share a directory: all changes are made under a lock that
the system frees when its owner dies. On file systems without locks (some network ones), let only one process write.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.optim import Optimizer

from iwopd.filesystem import alive, first_free, locked, make_directory, read_json, remove, sync, write_atomic
from iwopd.train.average import Average
from iwopd.train.checkpoint_files import Checkpoint, damage, read_checkpoint, refuse_strangers, seal, write_weights
from iwopd.train.checkpoint_optimizer import OptimizerState
from iwopd.train.checkpoint_state import CheckpointError, model_bytes, write_model, write_rng

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Checkpoint", "CheckpointError", "CheckpointStore"]

log = logging.getLogger(__name__)
JSON: TypeAlias = "str | int | float | bool | Sequence[JSON] | Mapping[str, JSON] | None"

_PROTECTED = "protected.json"
_STEP = re.compile(r"step-(\d{6,})")
_TEMPORARY = re.compile(r"\.tmp-(?P<kind>deleted-|replaced-|)(?P<name>step-\d{6,})-(?P<pid>\d+)(-\d+)?")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # how libraries written in Rust report what the system said


class CheckpointStore:
    """The checkpoints of one run: the `keep` newest ones and protected ones. `notify` tells the user of damage."""

    def __init__(self, directory: Path, *, keep: int = 2, notify: Callable[[str], None] = log.warning) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.directory, self.keep, self._notify = Path(directory), keep, notify
        if self.directory.is_dir():
            with locked(self.directory):
                self._sweep()

    # --- writing ----------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        *,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        optimizer: Optimizer | OptimizerState,
        state: Mapping[str, JSON],
        card: str | None = None,
        average: Average | None = None,
    ) -> Path:
        """Write the checkpoint of `step`, synced to disk, and return its folder; `card` is the README.md next to the weights.

        A valid checkpoint of the same step is replaced. Older ones beyond `keep` are deleted once the new one is in place;
        those of later steps are kept. On any error the existing checkpoints are unchanged.
        """
        _name(step)  # before anything else is done
        plain_state = _plain("state", state)
        held = optimizer if isinstance(optimizer, OptimizerState) else OptimizerState.of(optimizer)
        if not hasattr(model, "save_pretrained"):
            raise TypeError(f"the model is a {type(model).__name__} without save_pretrained: unwrap it before saving")

        def write(draft: Path) -> None:
            write_rng(draft)  # first: nothing after it may draw a random number that the resumed run would not
            write_model(draft / "model", model, tokenizer, card)
            held.write(draft)
            if average is not None:
                average.write(draft)
            seal(draft, step, plain_state)

        return self._write(step, write, needed=model_bytes(model) + held.nbytes + (average.nbytes if average else 0))

    def adopt(self, step: int, model: Path, state: Mapping[str, JSON]) -> Path:
        """Make a `from_pretrained` folder of another engine the checkpoint of `step`, as safely as `save` writes one."""
        plain_state = _plain("state", state)
        needed = sum(path.stat().st_size for path in model.rglob("*") if path.is_file())
        return self._write(step, lambda draft: write_weights(draft, step, model, plain_state), needed=needed)

    def _write(self, step: int, write: Callable[[Path], None], *, needed: int) -> Path:
        name = _name(step)
        with ExitStack() as stack:
            draft: Path | None = None
            try:
                make_directory(self.directory)
                with locked(self.directory):
                    self._sweep()
                    draft = self._temporary("", name)
                    draft.mkdir()
                    stack.enter_context(locked(draft))  # held until the end: shows that the owner lives
                write(draft)
                with locked(self.directory):
                    self._put_in_place(draft, name)
                    self._retain(step)
            except BaseException as error:
                if draft is not None:
                    shutil.rmtree(draft, ignore_errors=True)
                if (cause := _system_error(error)) is None:
                    raise
                raise CheckpointError(_failure(step, self.directory, cause, needed)) from error
        return self.directory / name

    def protect(self, checkpoint: int | str) -> None:
        """Exempt this checkpoint (step or folder name) from retention, for instance because it is the best so far."""
        step = _step(checkpoint)
        if step not in self.steps():
            raise CheckpointError(f"cannot protect step {step}: {self.directory} has checkpoints of steps {self.steps()}")
        self._change_protected(lambda steps: steps | {step})

    def unprotect(self, checkpoint: int | str) -> None:
        """Subject this checkpoint to retention again; a later save deletes it when it is no longer among the newest."""
        self._change_protected(lambda steps: steps - {_step(checkpoint)})

    # --- reading ----------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps of the existing checkpoints, ascending, unchecked."""
        if not self.directory.is_dir():
            return []
        found = (_STEP.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match in found if match and _name(int(match[1])) == match[0])

    def protected(self) -> frozenset[int]:
        """Steps that retention never deletes."""
        path = self.directory / _PROTECTED
        try:
            return frozenset(int(step) for step in read_json(path)["steps"])
        except FileNotFoundError:
            return frozenset()
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}): repair or delete it and protect the steps again"
            ) from error

    def latest(self) -> Checkpoint | None:
        """The newest valid checkpoint; None if there is none. Newer damaged ones are set aside, with a message."""
        if not self.directory.is_dir():
            return None
        with locked(self.directory):
            self._sweep()
            for step in reversed(self.steps()):
                path = self.directory / _name(step)
                if (problem := damage(path, step)) is None:
                    refuse_strangers(path)
                    return read_checkpoint(path, step)
                self._set_aside(path, problem)
        return None

    def open(self, checkpoint: int | str) -> Checkpoint:
        """One checkpoint by step or folder name, checked."""
        step = _step(checkpoint)
        path = self.directory / _name(max(0, step))
        if step not in self.steps():
            raise CheckpointError(f"there is no checkpoint of step {step}: {self.directory} has steps {self.steps()}")
        with locked(self.directory):
            if (problem := damage(path, step)) is not None:
                raise CheckpointError(f"checkpoint {path} is damaged: {problem}. Use another one: {self.steps()}")
            refuse_strangers(path)
            return read_checkpoint(path, step)

    # --- under the directory's lock ---------------------------------------------------------------------------------

    def _temporary(self, kind: str, name: str) -> Path:
        """A free name for unfinished work of this process."""
        return first_free(self.directory / f".tmp-{kind}{name}-{os.getpid()}")

    def _sweep(self) -> None:
        """Remove unfinished work of dead processes; restore a checkpoint that was being replaced.

        Only drafts are written without the lock that we hold, so only their owner may live. Elsewhere the process id means
        nothing: it may have been reused, and a replaced checkpoint would stay hidden.
        """
        for path in sorted(self.directory.glob(".tmp-*")):
            match = _TEMPORARY.fullmatch(path.name)
            try:
                if path.name.startswith(f".tmp-{_PROTECTED}"):
                    path.unlink()  # its writer would hold the lock that we hold
                elif match is not None and (match["kind"] or int(match["pid"]) == os.getpid() or not alive(int(match["pid"]))):
                    self._clear(path, match)  # this process's own unfinished work is recognised by its lock
            except OSError as error:
                self._notify(f"cannot clear the unfinished checkpoint {path}: {error}. It does no harm but takes space")

    def _clear(self, path: Path, match: re.Match[str]) -> None:
        original = self.directory / match["name"]
        with locked(path, wait=False) as free:
            if not free:  # the owner lives after all: another thread, or a process in another container or machine
                return
            if match["kind"] == "replaced-" and not os.path.lexists(original):
                path.rename(original)
            else:
                remove(path)

    def _put_in_place(self, draft: Path, name: str) -> None:
        """Rename the finished draft. A folder cannot replace a non-empty one, so an existing one is moved away first."""
        target = self.directory / name
        old: Path | None = None
        if os.path.lexists(target):
            if (problem := damage(target, _step(name))) is not None:
                self._set_aside(target, problem, must=True)
            else:
                old = self._temporary("replaced-", name)
                target.rename(old)
        try:
            draft.rename(target)
        except BaseException:
            if old is not None and not os.path.lexists(target):
                old.rename(target)
            raise
        sync(self.directory)
        if old is not None:
            self._delete(old)

    def _retain(self, newest: int) -> None:
        """Delete checkpoints older than `newest` beyond `keep`, counting only intact ones. Errors do not fail the save."""
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
                elif (problem := damage(path, step)) is None:
                    kept += 1
                else:
                    self._set_aside(path, problem)
        except (OSError, CheckpointError) as error:
            self._notify(f"old checkpoints in {self.directory} were not all deleted: {error}")

    def _delete(self, path: Path) -> None:
        """Rename first, so that a half-deleted checkpoint is never read."""
        match = _TEMPORARY.fullmatch(path.name)
        trash = self._temporary("deleted-", match["name"] if match else path.name)
        try:
            path.rename(trash)
            remove(trash)
        except OSError as error:
            self._notify(f"cannot delete the old checkpoint {path}: {error}. Delete it by hand if space runs short")

    def _set_aside(self, path: Path, problem: str, *, must: bool = False) -> None:
        aside = first_free(path.with_name(f"damaged-{path.name}"))
        try:
            path.rename(aside)
            sync(self.directory)
        except OSError as error:
            if must:
                raise
            self._notify(f"checkpoint {path} is damaged: {problem}. It is skipped; moving it aside failed: {error}")
        else:
            self._notify(f"checkpoint {path} is damaged: {problem}. It was moved to {aside.name} and is not used")

    def _change_protected(self, change: Callable[[frozenset[int]], frozenset[int]]) -> None:
        if not self.directory.is_dir():
            return
        path = self.directory / _PROTECTED
        with locked(self.directory):
            steps = sorted(change(self.protected()))
            try:
                write_atomic(path, json.dumps({"steps": steps}))
            except OSError as error:
                raise CheckpointError(f"cannot write {path}: {error}. The steps protected so far stay protected") from error


# --- names, checks and messages -------------------------------------------------------------------------------------


def _name(step: int) -> str:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step must be an integer of at least 0, got {step!r}")
    return f"step-{step:06d}"


def _step(checkpoint: int | str) -> int:
    if isinstance(checkpoint, int):
        return checkpoint
    match = _STEP.fullmatch(checkpoint)
    if match is None:
        raise ValueError(f"{checkpoint!r} is not a checkpoint: give a step, or a folder name such as 'step-000010'")
    return int(match[1])


def _plain(name: str, value: object) -> Any:
    """`value` in plain JSON types; refuses what JSON would change or cannot hold."""
    if isinstance(value, Mapping):
        if strange := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"{name} has the key {strange[0]!r}: JSON would make it a string, so make it one")
        return {key: _plain(f"{name}[{key!r}]", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{name}[{index}]", item) for index, item in enumerate(value)]
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"{name} is a {type(value).__name__}, which JSON cannot hold: give numbers, strings, lists and dicts")


def _system_error(error: BaseException) -> OSError | None:
    """The underlying OSError, also from library exceptions that only quote its number; None if there is none."""
    if isinstance(error, OSError):
        return error
    match = None if isinstance(error, CheckpointError) else _OS_ERROR.search(str(error))
    return OSError(int(match[1]), os.strerror(int(match[1]))) if match else None


def _failure(step: int, directory: Path, cause: OSError, needed: int) -> str:
    try:
        free = f"{shutil.disk_usage(directory).free:,} are free"
    except OSError as error:
        free = f"how many are free is unknown ({error.strerror})"
    remedy = {
        errno.ENOSPC: "free some space there or put the run on another disk",
        errno.EDQUOT: "free some of your quota or put the run on another disk",
        errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
        errno.EROFS: "put the run on a disk that can be written",
        errno.EACCES: "give yourself write access or put the run elsewhere",
        errno.EPERM: "give yourself write access or put the run elsewhere",
    }.get(cause.errno or 0, "check the disk, or put the run on another one")
    return (
        f"cannot save the checkpoint of step {step} in {directory}: {cause.strerror or cause}. "
        f"It needs about {needed:,} bytes, {free}. Earlier checkpoints are unchanged: {remedy}, then resume"
    )
