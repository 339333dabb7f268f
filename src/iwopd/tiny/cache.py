"""Pretrained models on disk: one folder per recipe, built once.

    <cache>/tiny/<name>-<lineage>-<hash of the recipe>/   config.json  model.safetensors  tokenizer...  entry.json

A folder is written under a temporary name and renamed when it is complete. `entry.json` holds the recipe and the SHA-256 of
every file: safetensors does not detect a flipped bit, so an entry is checked whenever it is opened, and a damaged one is
rebuilt. A lock next to the folder makes a second process wait for the first one's result instead of training the same model.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from iwopd.filesystem import sha256
from iwopd.tiny.architecture import RECIPE_VERSION, ModelRecipe
from iwopd.tiny.pretrain import PretrainingListener

log = logging.getLogger(__name__)
ENTRY = "entry.json"
_REQUIRED = ("config.json", "model.safetensors", "tokenizer.json")


def cache_dir() -> Path:
    """Where models are kept: `$IWOPD_CACHE`, or the user's cache directory."""
    if chosen := os.environ.get("IWOPD_CACHE"):
        return Path(chosen)
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("iwopd"))


def model_folder(recipe: ModelRecipe) -> Path:
    """Where this model is, or will be once it is trained."""
    return cache_dir() / "tiny" / recipe.key


def cached_models(
    recipes: Mapping[str, ModelRecipe], *, refresh: bool = False, progress: PretrainingListener | None = None
) -> dict[str, Path]:
    """Folders of these models by label. Missing ones are trained in parallel, one process each.

    `progress` is called with each model's label. `refresh` trains all of them again.
    """
    folders = {label: model_folder(recipe) for label, recipe in recipes.items()}
    root = cache_dir() / "tiny"
    if not refresh and all(damage(folder) is None for folder in folders.values()):
        return folders
    root.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        for key in sorted({folder.name for folder in folders.values()}):  # always in the same order: no deadlock
            _lock(root / f"{key}.lock", stack)
        missing: dict[str, ModelRecipe] = {}
        for label, recipe in recipes.items():
            state = damage(folders[label])
            if state is not None and folders[label].exists():
                log.warning("cached model %s is damaged (%s): training it again", folders[label], state)
            if (refresh or state is not None) and recipe not in missing.values():
                missing[label] = recipe
        if missing:
            _build(missing, root, progress)
    return folders


def damage(folder: Path) -> str | None:
    """What is wrong with a cache entry; None if it is intact."""
    try:
        files = json.loads((folder / ENTRY).read_text(encoding="utf-8"))["files"]
        if lost := [name for name in _REQUIRED if name not in files]:
            return f"{ENTRY} does not list {lost[0]}"
        for name, digest in files.items():
            if sha256(folder / name) != digest:
                return f"{name} has changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{ENTRY} cannot be used: {error}"
    return None


def weights_digest(folder: Path) -> str:
    """Names the weights of a cache entry: a recipe gives other ones on another kind of processor."""
    digest: str = json.loads((folder / ENTRY).read_text(encoding="utf-8"))["files"]["model.safetensors"]
    return digest[:12]


def _lock(path: Path, stack: ExitStack) -> None:
    """Take a lock that the system frees when its owner dies; log before waiting for another process."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.warning("another process is training %s: waiting for it", path.stem)
        lock.acquire()
    stack.callback(lock.release)


def _build(recipes: Mapping[str, ModelRecipe], root: Path, progress: PretrainingListener | None) -> None:
    """Train, seal and move into place. The caller holds the locks, so leftovers of the same recipes are stale."""
    for recipe in recipes.values():
        for leftover in root.glob(f".{recipe.key}.*"):
            shutil.rmtree(leftover, ignore_errors=True)
    drafts = {label: Path(tempfile.mkdtemp(prefix=f".{recipe.key}.", dir=root)) for label, recipe in recipes.items()}
    try:
        _train(recipes, drafts, progress)
        for label, draft in drafts.items():
            _seal(draft, recipes[label])
            _move(draft, root / recipes[label].key)
    finally:
        for draft in drafts.values():
            shutil.rmtree(draft, ignore_errors=True)


def _train(recipes: Mapping[str, ModelRecipe], drafts: Mapping[str, Path], progress: PretrainingListener | None) -> None:
    """One process per model, all in parallel; their lines of progress reach the caller's thread through one queue."""
    lines: queue.Queue[tuple[str, str | None]] = queue.Queue()
    with ExitStack() as stack:
        workers = {}
        for label, recipe in recipes.items():
            errors = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
            worker = _start(recipe, drafts[label], errors)
            stack.callback(worker.wait)
            stack.callback(worker.kill)
            workers[label] = worker, errors
            threading.Thread(target=_forward, args=(label, worker, lines), daemon=True).start()
        running = len(workers)
        while running:
            label, line = lines.get()
            if line is not None:
                if progress is not None and line.startswith("["):
                    step, steps, loss = json.loads(line)
                    progress(label, step, steps, loss)
                continue
            running -= 1
            worker, errors = workers[label]
            if code := worker.wait():
                errors.seek(0)
                raise RuntimeError(f"training of the {label} stopped with exit code {code}:\n{errors.read()[-2000:].strip()}")


def _start(recipe: ModelRecipe, draft: Path, errors: IO[str]) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),  # the worker imports what this process can import
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    worker = subprocess.Popen(
        [sys.executable, "-m", "iwopd.tiny", str(draft)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=environment,
        text=True,
        encoding="utf-8",
    )
    assert worker.stdin is not None
    with suppress(BrokenPipeError):  # it died at once: its exit code and last output are reported later
        json.dump(recipe.to_dict(), worker.stdin)
        worker.stdin.close()
    return worker


def _forward(label: str, worker: subprocess.Popen[str], lines: queue.Queue[tuple[str, str | None]]) -> None:
    assert worker.stdout is not None
    with worker.stdout:
        for line in worker.stdout:
            lines.put((label, line))
    lines.put((label, None))


def _seal(draft: Path, recipe: ModelRecipe) -> None:
    files = {path.name: sha256(path) for path in sorted(draft.iterdir())}
    entry = {"version": RECIPE_VERSION, "recipe": recipe.to_dict(), "files": files}
    (draft / ENTRY).write_text(json.dumps(entry, indent=1), encoding="utf-8")


def _move(draft: Path, folder: Path) -> None:
    """Rename into place. An existing folder is renamed away first, because a folder cannot replace a non-empty one."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True) as old:
        if folder.exists():
            folder.rename(Path(old) / "old")
        draft.rename(folder)
