"""Where a task's problems come from: a local JSONL or parquet file, a file on the Hugging Face hub, a released file."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from iwopd.errors import UserError

DATA_FOLDER = "IWOPD_DATA"
"""Environment variable: a folder whose files are used before anything is downloaded."""


class SourceError(UserError, ValueError):
    """A data file that cannot be had or read, with the way out."""


@dataclass(frozen=True)
class Hub:
    """A file of a data set on the Hugging Face hub."""

    repo: str
    file: str
    """Path in the repository: parquet or JSONL."""
    revision: str = "main"

    def __str__(self) -> str:
        return f"hub:{self.repo}@{self.revision}/{self.file}"

    def fetch(self) -> Path:
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(self.repo, self.file, repo_type="dataset", revision=self.revision))
        except Exception as error:  # offline, gone, gated, renamed: the hub has an error class for each
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise SourceError(f"cannot get {self} ({reason}); give a local file with --data TASK=FILE") from None


@dataclass(frozen=True)
class Release:
    """A file at an address, kept in the user's cache once it is there."""

    url: str

    def __str__(self) -> str:
        return self.url

    def fetch(self) -> Path:
        name = self.url.rpartition("/")[2].removesuffix(".gz")
        path = Path(platformdirs.user_cache_dir("iwopd")) / "data" / name
        if path.exists():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{name}.{os.getpid()}.part")
        try:
            with urllib.request.urlopen(self.url, timeout=60) as response, draft.open("wb") as file:
                if self.url.endswith(".gz"):
                    with gzip.open(response) as unpacked:
                        shutil.copyfileobj(unpacked, file)
                else:
                    shutil.copyfileobj(response, file)
            draft.replace(path)
        except (OSError, EOFError) as error:
            raise SourceError(f"cannot get {self.url} ({error}); give a local file with --data TASK=FILE") from None
        finally:
            draft.unlink(missing_ok=True)
        return path


@dataclass(frozen=True)
class Local:
    """A file on this machine."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def fetch(self) -> Path:
        if not self.path.is_file():
            raise SourceError(f"there is no data file {self.path}")
        return self.path


Source = Hub | Release | Local


def local_copy(name: str) -> Local | None:
    """The file of this name in the folder that `IWOPD_DATA` names, if it is there."""
    folder = os.environ.get(DATA_FOLDER)
    path = Path(folder) / name if folder else None
    return Local(path) if path is not None and path.is_file() else None


def records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every record of a JSONL or parquet file, with words for where it stands ("aime.jsonl, line 3")."""
    yield from _parquet(path) if path.suffix == ".parquet" else _jsonl(path)


def _jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}, line {number}", _object(line, f"{path}, line {number}")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not UTF-8: {error}") from None
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from None


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        item = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise SourceError(f"{where} is not JSON: {error}") from None
    if not isinstance(item, dict):
        raise SourceError(f"{where}: expected an object, got {type(item).__name__}")
    return item


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise SourceError(f"reading {path} needs pyarrow: pip install 'iwopd[data]', or convert it to JSONL") from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise SourceError(f"cannot read {path} as parquet: {error}") from None
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row
