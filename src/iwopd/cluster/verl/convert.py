"""verl's checkpoints: which are whole, and as plain Hugging Face folders among the run's own.

    <checkpoints>/global_step_10/actor/model_world_size_8_rank_0.pt ...   what verl goes on from
                  global_step_10/actor/huggingface/                       weights, config and tokenizer (cluster.save_hf)
                  global_step_10/data.pt                                  where the prompts stand
                  latest_checkpointed_iteration.txt                       written last

A step's folder counts if verl has noted it as its latest or an earlier one, and every rank's files are there: a job that was
killed, or a disk that was full, leaves others.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors import safe_open

from iwopd.cluster.verl.errors import VerlError
from iwopd.config import Config
from iwopd.errors import UserError
from iwopd.models import load_tokenizer
from iwopd.runs.directory import RunDirectory
from iwopd.train.card import model_card
from iwopd.train.checkpoint import CheckpointStore

_STEP = re.compile(r"global_step_(\d+)")
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
SHARDS = ("model", "optim", "extra_state")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def whole_checkpoints(folder: Path) -> dict[int, Path]:
    """Checkpoints that verl can go on from, by step."""
    if not folder.is_dir():
        return {}
    found = {int(match[1]): path for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))}
    latest = _noted(folder)
    return {step: path for step, path in sorted(found.items()) if step <= latest and _ranks(path) is not None}


def newest(folder: Path) -> tuple[int, Path] | None:
    """The newest whole checkpoint."""
    found = whole_checkpoints(folder)
    return max(found.items()) if found else None


def full_disk(folder: Path) -> str:
    """Words for a job that failed, if there is no room for another checkpoint: not every writer says why it cannot write."""
    found = newest(folder)
    if found is None:
        return ""
    size = sum(path.stat().st_size for path in found[1].rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free
    if free >= size:
        return ""
    return f" (not enough room: {free / 2**20:,.1f} MB are free in {folder}, and a checkpoint takes {size / 2**20:,.1f} MB)"


def check_ranks(checkpoint: Path, ranks: int) -> None:
    """A checkpoint of shards goes back onto as many ranks as it was saved by."""
    saved = _ranks(checkpoint)
    if saved is not None and saved != ranks:
        raise VerlError(
            f"{checkpoint} was saved by {saved} student GPUs, and now there are {ranks}: resume with the same number "
            "(cluster.nodes, gpus_per_node, teacher_gpus)"
        )


def adopt(config: Config, run: RunDirectory, checkpoints: Path) -> list[int]:
    """Turn whole checkpoints that the run does not have yet into plain folders; returns their steps."""
    store = CheckpointStore(run.checkpoints, keep=config.checkpoint.keep)
    have = store.steps()
    missing = [(step, path) for step, path in whole_checkpoints(checkpoints).items() if step > max(have, default=0)]
    done = []
    for step, path in missing[-config.checkpoint.keep :]:
        with tempfile.TemporaryDirectory(dir=run.path, prefix=".tmp-convert-") as scratch:
            try:
                model = _plain_folder(config, path / "actor", Path(scratch) / "model")
            except (FileNotFoundError, shutil.Error):  # verl has just deleted it in favour of a newer one
                continue
            (model / "README.md").write_text(model_card(config, run, step), encoding="utf-8")
            store.adopt(step, model, {"step": step, "engine": "verl"})
        done.append(step)
    return done


def _noted(folder: Path) -> float:
    """The step that verl noted last; without limit if its note was lost to a full disk, when all else had been written."""
    try:
        text = (folder / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8")
    except FileNotFoundError:
        return 0
    return int(text) if text.strip().isdigit() else math.inf


def _ranks(checkpoint: Path) -> int | None:
    """How many ranks saved it; None if a file is missing."""
    actor = checkpoint / "actor"
    try:
        ranks = int(json.loads((actor / "fsdp_config.json").read_text(encoding="utf-8"))["world_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    names = [f"{kind}_world_size_{ranks}_rank_{rank}.pt" for kind in SHARDS for rank in range(ranks)]
    whole = (checkpoint / "data.pt").is_file() and all((actor / name).is_file() for name in names)
    return ranks if whole else None


def _plain_folder(config: Config, actor: Path, target: Path) -> Path:
    """The weights with the student's own tokenizer: verl saves its own, which it may have changed."""
    saved = actor / "huggingface"
    if any(saved.glob("*.safetensors")):
        shutil.copytree(saved, target, copy_function=_link)
    else:
        _merge(actor, target)
    _name_dtype(target)
    from iwopd.cluster.verl.translate import model_path

    try:
        tokenizer = load_tokenizer(model_path(config, "student"), trust_remote_code=config.models.trust_remote_code)
    except UserError:  # not to be had any more: verl's will do
        return target
    for name in TOKENIZER_FILES:
        (target / name).unlink(missing_ok=True)
    tokenizer.save_pretrained(target)
    return target


def _name_dtype(folder: Path) -> None:
    """The precision of the weights, which verl's config.json gets wrong: loaded as it says they would be rounded."""
    path = folder / "config.json"
    with safe_open(min(folder.glob("*.safetensors")), framework="pt") as file:
        dtype = DTYPES.get(file.get_slice(next(iter(file.keys()))).get_dtype())
    if dtype is not None:
        path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "dtype": dtype}, indent=2) + "\n")


def _link(source: str, target: str) -> None:
    """Weights are linked, where the file system can: verl never changes a file that it has written."""
    if source.endswith(".safetensors"):
        try:
            Path(target).hardlink_to(source)
            return
        except OSError:  # another file system
            pass
    shutil.copyfile(source, target)


def _merge(actor: Path, target: Path) -> None:
    """By verl's own merger, in a process of its own: shards are pickles, which are not opened here. It writes bfloat16."""
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    command += ["--local_dir", str(actor), "--target_dir", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode:
        words = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise VerlError(f"verl's merger could not make a plain folder of {actor} (exit code {done.returncode}):\n{words}")
