"""Sources of records: JSONL and parquet files, local or in a data set on the Hugging Face hub; released files.

Used by evaluation (one file per task) and training (all files of a split).
"""

from __future__ import annotations

import gzip
import json
import os
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any

import platformdirs

from iwopd import hub
from iwopd.errors import UserError
from iwopd.filesystem import sha256

MOST_BYTES = 2**29
"""Of a file that is loaded from a URL, unpacked."""
DATA_FOLDER = "IWOPD_DATA"
"""Environment variable: a folder whose files are preferred to downloads."""
HUB = "hub:"
"""Prefix of a data set on the hub: `hub:org/name`."""
REMEDY = "give a local file: --data TASK=FILE for a task, source = FILE for a training set"


class SourceError(UserError, ValueError):
    """A data file that cannot be fetched or read, with the remedy."""


@dataclass(frozen=True)
class Hub:
    """A file of a data set on the Hugging Face hub."""

    repo: str
    file: str
    """Path in the repository: parquet or JSONL."""
    revision: str = "main"
    sha256: str | None = None
    """Of the file; None: whatever the revision holds."""

    def __str__(self) -> str:
        return f"hub:{self.repo}@{self.revision}/{self.file}"

    def fetch(self) -> Path:
        from huggingface_hub import hf_hub_download

        silence = hub.silence()
        try:
            path = Path(hf_hub_download(self.repo, self.file, repo_type="dataset", revision=self.revision))
        except Exception as error:  # offline, gone, gated, renamed: the hub has an error class for each
            raise SourceError(f"cannot get {self} ({silence or _first_line(error)}); {REMEDY}") from None
        check_file(path, self.sha256, str(self))
        return path


@dataclass(frozen=True)
class Release:
    """A file at a URL, kept in the user's cache."""

    url: str
    sha256: str | None = None
    """Of the file, unpacked."""

    def fetch(self) -> Path:
        name = self.url.rpartition("/")[2].removesuffix(".gz")
        path = Path(platformdirs.user_cache_dir("iwopd")) / "data" / name
        if path.exists():
            check_file(path, self.sha256, f"{path}, once loaded from {self.url},")
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{name}.{os.getpid()}.part")
        try:
            with urllib.request.urlopen(self.url, timeout=60) as response, draft.open("wb") as file:
                _copy(gzip.GzipFile(fileobj=response) if self.url.endswith(".gz") else response, file)
                if missing := getattr(response, "length", None):  # of what was announced; a local file announces nothing
                    raise EOFError(f"it breaks off, {missing} bytes are missing")
            check_file(draft, self.sha256, self.url)
            draft.replace(path)
        except (OSError, EOFError, zlib.error, HTTPException) as error:
            raise SourceError(f"cannot get {self.url} ({_first_line(error)}); {REMEDY}") from None
        finally:
            draft.unlink(missing_ok=True)
        return path


def _copy(source: Any, target: IO[bytes]) -> None:
    """A megabyte may unpack to a thousand: what is larger than any data set of ours is not."""
    size = 0
    while piece := source.read(2**20):
        size += len(piece)
        if size > MOST_BYTES:
            raise OSError(f"it has more than {MOST_BYTES >> 20} MiB")
        target.write(piece)


@dataclass(frozen=True)
class Local:
    """A file on this machine."""

    path: Path

    def fetch(self) -> Path:
        if not self.path.is_file():
            raise SourceError(f"there is no data file {self.path}")
        return self.path


Source = Hub | Release | Local


def check_file(path: Path, expected: str | None, what: str) -> None:
    """Refuse a file with other content than the one that was tested."""
    if expected is not None and (found := sha256(path)) != expected:
        raise SourceError(
            f"{what} has SHA-256 {found[:16]}..., not {expected[:16]}...: it is damaged, or somebody changed it. Delete it and "
            f"try again, or {REMEDY}"
        )


def local_copy(name: str) -> Local | None:
    """The file of this name in the folder `IWOPD_DATA`, if it exists."""
    folder = os.environ.get(DATA_FOLDER)
    path = Path(folder) / name if folder else None
    return Local(path) if path is not None and path.is_file() else None


def data_files(source: str, pattern: str | None = None, revision: str | None = None) -> list[Path]:
    """The files of a set, sorted by name: a file, a folder, or `hub:org/name` (fetched if not in the cache).

    `pattern` selects files of a folder or data set (`data/train-*.parquet`); without one, its training split.
    """
    if source.startswith(HUB):
        repo = source.removeprefix(HUB)
        names = pick_files(_hub_names(repo, revision or "main"), pattern, source)
        return [Hub(repo, name, revision or "main").fetch() for name in names]
    path = Path(source)
    if path.is_dir():
        names = [file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()]
        return [path / name for name in pick_files(names, pattern, source)]
    if not path.exists():
        raise SourceError(f"there is no file or folder {source}; a data set of the hub is written {HUB}org/name")
    return [path]


def pick_files(names: Sequence[str], pattern: str | None, where: str) -> list[str]:
    """The files of a data set that match the pattern; without one, those of its only training split."""
    known = sorted(name for name in names if name.endswith((".parquet", ".jsonl")) and not name.startswith("."))
    shown = ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "") if known else "none"
    if pattern is not None:
        found = [name for name in known if fnmatchcase(name, pattern)]
        if not found:
            raise SourceError(f"no parquet or JSONL file of {where} matches {pattern!r}; there are: {shown}")
        return found
    found = [name for name in known if "train" in name] or known
    kinds = {(name.rpartition("/")[0], name.rpartition(".")[2]) for name in found}
    if len(kinds) != 1 or (len(found) > 1 and "train" not in found[0]):
        raise SourceError(f"{where} does not say which files are its training split (files: {shown}); set files to a pattern")
    return found


def _hub_names(repo: str, revision: str) -> list[str]:
    from huggingface_hub import HfApi

    silence = hub.silence()
    try:
        return list(HfApi().list_repo_files(repo, repo_type="dataset", revision=revision))
    except Exception as error:  # as above
        raise SourceError(f"cannot list {HUB}{repo}@{revision} ({silence or _first_line(error)}); {REMEDY}") from None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def records(
    path: Path, columns: Sequence[str] | None = None, needed: Sequence[str] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every record of a JSONL or parquet file, with its location ("aime.jsonl, line 3").

    Only `columns` are read from a parquet file: the others may be a hundred times as large. A file that has none of the
    `needed` ones is read whole, so that an error can list its columns.
    """
    yield from _parquet(path, columns, needed) if path.suffix == ".parquet" else _jsonl(path)


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


def _parquet(path: Path, columns: Sequence[str] | None, needed: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise SourceError(f"reading {path} needs pyarrow: pip install 'iwopd[data]', or convert it to JSONL") from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            there = file.schema_arrow.names
            known = {name.partition(".")[0] for name in needed} & set(there)
            present = None if columns is None or not known else [name for name in there if name in columns]
            for batch in file.iter_batches(batch_size=1024, columns=present):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise SourceError(f"cannot read {path} as parquet: {error}") from None
