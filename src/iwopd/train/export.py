"""A student out of a run: a folder that plain `from_pretrained` loads, with its tokenizer and model card."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from iwopd.adapters import merge
from iwopd.errors import UserError
from iwopd.filesystem import follow_umask
from iwopd.models import load_tokenizer
from iwopd.runs.directory import RunDirectory
from iwopd.train.checkpoint import Checkpoint, CheckpointStore
from iwopd.train.checkpoint_state import BASE
from iwopd.train.loading import load_reference, open_world, source_of


class ExportError(UserError, RuntimeError):
    """A student that cannot be exported, with the reason."""


def export(source: Path, out: Path, *, merged: bool = False, step: int | None = None) -> str:
    """Write the student of a checkpoint, or a run's newest, to `out`, `merged` with its adapter; returns what was written."""
    run, checkpoint = _find(source, step)
    if os.path.lexists(out):
        raise ExportError(f"{out} is there already: choose another folder")
    adapter = (checkpoint.model_path / BASE).exists()
    draft = out.with_name(f".tmp-{out.name}-{os.getpid()}")
    try:
        if adapter and merged:
            _write_merged(run, checkpoint, draft)
        else:
            shutil.copytree(checkpoint.model_path, draft)
        if (settings := run.path / "config.toml").exists():
            shutil.copyfile(settings, draft / settings.name)
        follow_umask(*(path for path in draft.rglob("*") if path.is_file()))
        draft.rename(out)
    except OSError as error:
        raise ExportError(f"cannot write {out}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    kind = "whole model" if not adapter else "merged model" if merged else "adapter"
    return f"{kind} of step {checkpoint.step}"


def _find(source: Path, step: int | None) -> tuple[RunDirectory, Checkpoint]:
    """The run and the checkpoint that a path means: a run directory, or one of its checkpoints."""
    if (source / "manifest.json").exists():
        if step is not None:
            raise ExportError(f"{source} is one checkpoint: leave --step out, or name the run directory")
        return RunDirectory(source.absolute().parent.parent), CheckpointStore(source.absolute().parent).open(source.name)
    run = RunDirectory(source)
    run.about()
    store = CheckpointStore(run.checkpoints)
    checkpoint = store.latest() if step is None else store.open(step)
    if checkpoint is None:
        raise ExportError(f"{source} has no valid checkpoint yet")
    return run, checkpoint


def _write_merged(run: RunDirectory, checkpoint: Checkpoint, folder: Path) -> None:
    """On the CPU, in the precision of training; weights that were quantised for training are merged as they were before."""
    config = run.config()
    plain = config.model_copy(update={"lora": type(config.lora)()})
    student = source_of(plain, "student", open_world(plain, None))
    assert student is not None  # the config was validated
    model: Any = load_reference(plain, student, torch.device("cpu"))
    merge(model, checkpoint.model_path).save_pretrained(folder, save_original_format=False)
    load_tokenizer(checkpoint.model_path).save_pretrained(folder)
    if (card := checkpoint.model_path / "README.md").exists():
        text = card.read_text(encoding="utf-8").replace('library_name: "peft"', 'library_name: "transformers"', 1)
        text = text.replace('base_model_relation: "adapter"', 'base_model_relation: "finetune"', 1)
        (folder / card.name).write_text(text.partition("\n\nThis folder holds an adapter")[0] + "\n", encoding="utf-8")
