"""Scores kept on disk: an answer that was scored before is not scored again, and its log-probs are those of the first time.

It pays where answers recur: given answers over several epochs, probes, evaluations of the same rollouts. What is kept are
log-probs. Whoever wants more (entropies, likely ids, states), or follows answers as they are written, asks the scorer itself.

A file per answer, named by a hash of teacher, temperature, prompt and answer: safetensors, with a checksum. Files are written
under another name and renamed, so processes may share a folder; a file that cannot be believed is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from iwopd.algo.views import NOTHING, TokenScores, Wanted
from iwopd.filesystem import follow_umask, make_directory
from iwopd.teacher.scorer import Follower, HasModel, OutputMatrix, Scorer, ScoringPath
from iwopd.types import Prompt, Rollout

FORMAT = "iwopd-scores-1"
SUFFIX = ".safetensors"
LEFT = 0.9
"""Share of the limit that is left when the oldest files have gone."""


class ScoreStore:
    """Log-probs [T] by key in a folder of at most `most` bytes; the oldest go first."""

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.most = folder, most
        make_directory(folder)
        found = []
        for entry in folder.glob(f"*/*{SUFFIX}"):
            with suppress(OSError):  # another process has taken it away
                about = entry.stat()
                found.append((about.st_mtime_ns, entry, about.st_size))
        self._sizes: OrderedDict[Path, int] = OrderedDict((entry, size) for _, entry, size in sorted(found))
        """Of the files that are known, the oldest first; those that other processes write meanwhile are not."""
        self._total = sum(self._sizes.values())

    def get(self, key: str, tokens: int) -> Tensor | None:
        """None: it is not there, or not what it should be."""
        path = self._path(key)
        try:
            with safe_open(path, framework="pt") as file:
                about, values = file.metadata() or {}, file.get_tensor("logprobs")
        except (OSError, SafetensorError, KeyError, ValueError):
            return None
        whole = about.get("format") == FORMAT and about.get("sha256") == _digest(values)
        right = whole and about.get("key") == key and values.shape == (tokens,) and values.dtype.is_floating_point
        return values if right else None

    def put(self, key: str, values: Tensor) -> None:
        path = self._path(key)
        make_directory(path.parent)
        draft = path.with_name(f".tmp-{path.name}-{os.getpid()}")
        values = values.contiguous()
        save_file({"logprobs": values}, draft, {"format": FORMAT, "key": key, "sha256": _digest(values)})
        follow_umask(draft)
        size = draft.stat().st_size
        draft.replace(path)
        self._total += size - self._sizes.pop(path, 0)
        self._sizes[path] = size
        if self._total > self.most:
            self._make_room()

    def _make_room(self) -> None:
        while self._sizes and self._total > LEFT * self.most:
            path, size = self._sizes.popitem(last=False)
            self._total -= size
            path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}{SUFFIX}"


class CachedScorer(Scorer):
    """Asks `scorer` only for what it has not said before."""

    def __init__(
        self, scorer: Scorer, store: ScoreStore, identity: Callable[[], Sequence[str]], *, temperature: float = 1.0
    ) -> None:
        """`identity` says which teacher it is; asked once, when the first answers come."""
        self.scorer, self.store, self.temperature = scorer, store, temperature
        self.here = scorer.here
        self.hits = self.misses = 0
        """Answers since `take_counts`."""
        self._identity, self._named = identity, ""

    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        return [one.logprobs for one in self.look(rollouts)]

    def look(
        self, rollouts: Sequence[Rollout], wanted: Wanted = NOTHING, chosen: Sequence[Tensor] | None = None
    ) -> list[TokenScores]:
        if wanted != NOTHING:
            return self.scorer.look(rollouts, wanted, chosen)
        keys = [self.key(rollout) for rollout in rollouts]
        found = {key: self.store.get(key, len(rollout)) for key, rollout in zip(keys, rollouts, strict=True)}
        missing = {key: rollout for key, rollout in zip(keys, rollouts, strict=True) if found[key] is None}
        self.misses += len(missing)
        self.hits += len(rollouts) - len(missing)
        if missing:
            for key, values in zip(missing, self.scorer.score(list(missing.values())), strict=True):
                found[key] = values.cpu()
                self.store.put(key, values.cpu())
        return [TokenScores(kept) for key in keys if (kept := found[key]) is not None]

    def key(self, rollout: Rollout) -> str:
        """Hash of all that the scores depend on."""
        self._named = self._named or json.dumps([FORMAT, *self._identity(), repr(self.temperature)])
        digest = hashlib.sha256(self._named.encode())
        for ids in (torch.tensor(rollout.prompt.token_ids), rollout.response_ids):
            digest.update(len(ids).to_bytes(8, "little") + ids.to(torch.int64).cpu().numpy().tobytes())
        return digest.hexdigest()

    def take_counts(self) -> tuple[int, int]:
        """Answers that were there and that were not, since the last call."""
        counts = self.hits, self.misses
        self.hits = self.misses = 0
        return counts

    def follow(self, wanted: Wanted = NOTHING) -> Follower:
        return self.scorer.follow(wanted)

    @property
    def gives(self) -> frozenset[str]:  # type: ignore[override]
        return self.scorer.gives

    @property
    def room(self) -> int | None:
        """Tokens that servers said they can read at once."""
        return getattr(self.scorer, "room", None)

    @property
    def whole_distribution(self) -> HasModel | None:
        return self.scorer.whole_distribution

    def output_matrix(self) -> OutputMatrix:
        return self.scorer.output_matrix()

    def local(self, name: str) -> dict[str, HasModel]:
        return self.scorer.local(name)

    def paths(self, name: str) -> Iterator[ScoringPath]:
        """Those of the scorer inside: the doctor asks it, not the files."""
        yield from self.scorer.paths(name)

    def try_out(self, prompts: Sequence[Prompt], *, vocab_size: int, max_tokens: int, wanted: Wanted = NOTHING) -> None:
        self.scorer.try_out(prompts, vocab_size=vocab_size, max_tokens=max_tokens, wanted=wanted)


def _digest(values: Tensor) -> str:
    return hashlib.sha256(values.cpu().contiguous().numpy().tobytes()).hexdigest()
