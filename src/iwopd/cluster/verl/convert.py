"""verl's checkpoints: which are complete, and how they become plain Hugging Face folders in the run directory.

    <checkpoints>/global_step_10/actor/model_world_size_8_rank_0.pt ...   what verl resumes from
                  global_step_10/actor/huggingface/                       weights, config and tokenizer (cluster.save_hf); of
                                                                          an adapter there are shards alone
                  global_step_10/data.pt                                  position in the prompts
                  latest_checkpointed_iteration.txt                       written last

A step's folder counts if verl has recorded it or a later one as its latest, and every rank's files exist: a killed job or a
full disk leaves incomplete ones.
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

from iwopd.adapters import adapter_settings
from iwopd.cluster.verl.errors import VerlError
from iwopd.cluster.verl.translate import model_path
from iwopd.config import Config
from iwopd.errors import UserError
from iwopd.models import load_tokenizer
from iwopd.runs.directory import RunDirectory
from iwopd.train.card import model_card
from iwopd.train.checkpoint import CheckpointStore
from iwopd.train.checkpoint_state import BASE

_STEP = re.compile(r"global_step_(\d+)")
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
SHARDS = ("model", "optim", "extra_state")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def whole_checkpoints(folder: Path) -> dict[int, Path]:
    """Checkpoints that verl can resume from, by step."""
    if not folder.is_dir():
        return {}
    found = {int(match[1]): path for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))}
    latest = _noted(folder)
    return {step: path for step, path in sorted(found.items()) if step <= latest and _ranks(path) is not None}


def newest(folder: Path) -> tuple[int, Path] | None:
    """The newest complete checkpoint."""
    found = whole_checkpoints(folder)
    return max(found.items()) if found else None


def full_disk(folder: Path) -> str:
    """A note for a failed job if there is no room for another checkpoint: not every write error says so."""
    if (found := newest(folder)) is None:
        return ""
    size = sum(path.stat().st_size for path in found[1].rglob("*") if path.is_file())
    if (free := shutil.disk_usage(folder).free) >= size:
        return ""
    return f" (not enough room: {free / 2**20:,.1f} MB are free in {folder}, and a checkpoint takes {size / 2**20:,.1f} MB)"


def check_ranks(checkpoint: Path, ranks: int) -> None:
    """A sharded checkpoint must be loaded by as many ranks as saved it."""
    saved = _ranks(checkpoint)
    if saved is not None and saved != ranks:
        raise VerlError(
            f"{checkpoint} was saved by {saved} student GPUs, and now there are {ranks}: resume with {saved}, on however many "
            "machines (--nodes, --gpus-per-node, --cluster.teacher-gpus), or start a new run from the weights alone: "
            "--models.student RUN/checkpoints/step-N/model and another --out"
        )


def adopt(config: Config, run: RunDirectory, checkpoints: Path) -> list[int]:
    """Convert complete checkpoints that the run does not have yet into plain folders; returns their steps."""
    store = CheckpointStore(run.checkpoints, keep=config.checkpoint.keep)
    newest_here = max(store.steps(), default=0)
    missing = [(step, path) for step, path in whole_checkpoints(checkpoints).items() if step > newest_here]
    done = []
    for step, path in missing[-config.checkpoint.keep :]:
        with tempfile.TemporaryDirectory(dir=run.path, prefix=".tmp-convert-") as scratch:
            try:
                make = _adapter_folder if config.lora.rank else _plain_folder
                model = make(config, path / "actor", Path(scratch) / "model")
            except (FileNotFoundError, shutil.Error):  # verl has just deleted it in favour of a newer one
                continue
            (model / "README.md").write_text(model_card(config, run, step), encoding="utf-8")
            store.adopt(step, model, {"step": step, "engine": "verl"})
        done.append(step)
    return done


def _noted(folder: Path) -> float:
    """The step that verl recorded last; infinite if a full disk emptied the record, which is written after all else."""
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
    _save_tokenizer(config, target)
    return target


def _adapter_folder(config: Config, actor: Path, target: Path) -> Path:
    """The adapter alone, as the local engine saves it."""
    target.mkdir()
    file = target / "adapter_model.safetensors"
    _run("iwopd.cluster.verl.adapter_shards", str(actor), str(file), what=f"the adapter of {actor}")
    with safe_open(file, framework="pt") as found:
        names = list(found.keys())
    settings = adapter_settings(config.lora.rank, config.lora.alpha, sorted({name.split(".")[-3] for name in names}))
    settings.base_model_name_or_path = model_path(config, "student")
    settings.inference_mode = True
    settings.save_pretrained(str(target))
    # Nobody loads the frozen weights here; the run's settings say whose they are.
    (target / BASE).write_text(json.dumps({"fingerprint": None}), encoding="utf-8")
    _save_tokenizer(config, target)
    return target


def _save_tokenizer(config: Config, target: Path) -> None:
    """The student's own, in place of verl's."""
    try:
        tokenizer = load_tokenizer(model_path(config, "student"), trust_remote_code=config.models.trust_remote_code)
    except UserError:  # no longer available: keep verl's
        return
    for name in TOKENIZER_FILES:
        (target / name).unlink(missing_ok=True)
    tokenizer.save_pretrained(target)


def _name_dtype(folder: Path) -> None:
    """Write the weights' precision into config.json. verl's is wrong, and loading with it would round the weights."""
    path = folder / "config.json"
    with safe_open(min(folder.glob("*.safetensors")), framework="pt") as file:
        dtype = DTYPES.get(file.get_slice(next(iter(file.keys()))).get_dtype())
    if dtype is not None:
        path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "dtype": dtype}, indent=2) + "\n")


def _link(source: str, target: str) -> None:
    """Hard-link weights if possible: verl never changes a file that it has written."""
    if source.endswith(".safetensors"):
        try:
            Path(target).hardlink_to(source)
            return
        except OSError:  # another file system
            pass
    shutil.copyfile(source, target)


def _merge(actor: Path, target: Path) -> None:
    """Run verl's own merger in a separate process: shards are pickles, which we do not open. It writes bfloat16."""
    merge = ("merge", "--backend", "fsdp", "--local_dir", str(actor), "--target_dir", str(target))
    _run("verl.model_merger", *merge, what=f"a plain folder of {actor}")


def _run(module: str, *arguments: str, what: str) -> None:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode:
        words = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise VerlError(f"{module} could not make {what} (exit code {done.returncode}):\n{words}")
