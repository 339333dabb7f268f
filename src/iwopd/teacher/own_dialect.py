"""The dialect of `iwopd serve-teacher`: everything that a model can say of tokens, in binary (`wire`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from iwopd.algo.views import NOTHING, TokenScores, Wanted
from iwopd.config.distributions import GIVES
from iwopd.teacher import wire
from iwopd.teacher.consistency import check_scores
from iwopd.teacher.errors import TeacherError
from iwopd.teacher.json_answers import check_echo
from iwopd.teacher.questions import TokenSequence
from iwopd.teacher.vllm_dialect import VllmDialect

EXPECTED = {"ids": torch.int32, "lengths": torch.int32, "top_ids": torch.int32}
"""Dtypes of an answer's tensors; those of log-probs are float32, those of states any of `wire.DTYPES`."""


class OwnDialect(VllmDialect):
    """Tokens are drawn as from vLLM."""

    gives = GIVES["iwopd"]
    path = wire.SCORES
    limits = "the server says what it does not have"

    def __init__(self) -> None:
        self.matrix: wire.MatrixFacts | None = None
        """The output matrix that hidden states must belong to; known before any are asked for."""

    def scoring(self, model: str | None, sequences: Sequence[TokenSequence], wanted: Wanted = NOTHING) -> Any:
        tensors = {
            "ids": torch.tensor([i for sequence in sequences for i in sequence.ids], dtype=torch.int32),
            "lengths": torch.tensor([len(sequence.ids) for sequence in sequences], dtype=torch.int32),
            "starts": torch.tensor([sequence.start for sequence in sequences], dtype=torch.int32),
        }
        if wanted.chosen:
            tensors["chosen"] = torch.cat([_chosen(sequence) for sequence in sequences]).to(torch.int32)
        if all(sequence.more is not None for sequence in sequences):
            tensors["more"] = torch.tensor([int(bool(sequence.more)) for sequence in sequences], dtype=torch.int32)
        about = {"model": model, "entropy": wanted.entropy, "top_k": wanted.top_k, "states": wanted.states}
        return wire.pack(tensors, about)

    def parse(self, content: bytes) -> Any:
        return wire.unpack(content)

    def most_bytes(self, sequences: Sequence[TokenSequence], wanted: Wanted) -> int:
        chosen = max((_chosen(sequence).shape[1] for sequence in sequences), default=0) if wanted.chosen else 0
        hidden = 0 if self.matrix is None else self.matrix.shape[1]
        per_token = wire.answer_bytes(wanted, chosen=chosen, hidden=hidden, item=4)
        tokens = sum(len(sequence.answer) for sequence in sequences)
        return wire.ENVELOPE + 8 * sum(len(sequence.ids) + 1 for sequence in sequences) + per_token * tokens

    def scores(self, answer: Any, sequences: Sequence[TokenSequence], wanted: Wanted = NOTHING) -> list[TokenScores]:
        tensors, about = answer
        _check_dtypes(tensors)
        _check_sequences(tensors, sequences)
        counts = [len(sequence.answer) for sequence in sequences]
        names = {"logprobs"} | {one.name for one in fields(TokenScores) if one.name in tensors}
        for name in sorted(names):
            if name not in tensors or tensors[name].dim() < 1 or len(tensors[name]) != sum(counts):
                got = f"has shape {list(tensors[name].shape)}" if name in tensors else "is not there"
                raise TeacherError(f"{name} {got}, and {sum(counts)} tokens were to be scored")
        found = TokenScores(**{name: _wide(tensors[name]) for name in names}).split(counts)
        size = about.get("vocab_size")
        if type(size) is not int or size < 1:
            raise TeacherError(f"the answer does not say how many ids its model has (vocab_size is {size!r})")
        for scores, sequence in zip(found, sequences, strict=True):
            check_scores(scores, sequence, wanted, size)
        if wanted.states:
            self._check_matrix(tensors["states"], about.get("matrix"))
        return found

    def _check_matrix(self, states: Tensor, sha256: Any) -> None:
        known = self.matrix
        if known is None:
            raise ValueError("hidden states were asked for before the output matrix was known")
        if sha256 != known.sha256 or states.shape[1] != known.shape[1]:
            raise TeacherError(
                f"its hidden states (size {states.shape[1]}) belong to another output matrix than the one that was fetched "
                f"(size {known.shape[1]}): the server was started again with another model, or the replicas differ"
            )


def _check_sequences(tensors: dict[str, Tensor], sequences: Sequence[TokenSequence]) -> None:
    ids, lengths = (tensors.get(name, torch.empty(0)).flatten().tolist() for name in ("ids", "lengths"))
    if lengths != [len(sequence.ids) for sequence in sequences]:
        raise TeacherError(f"{len(sequences)} sequences were sent, the answer has {len(lengths)}, or others")
    check_echo(ids, [i for sequence in sequences for i in sequence.ids])


def _chosen(sequence: TokenSequence) -> Tensor:
    if sequence.chosen is None or sequence.chosen.shape[:1] != (len(sequence.answer),):
        found = None if sequence.chosen is None else list(sequence.chosen.shape)
        raise ValueError(f"log-probs of chosen ids are wanted of {len(sequence.answer)} tokens, the ids have shape {found}")
    return sequence.chosen


def _wide(values: Tensor) -> Tensor:
    return values.long() if values.dtype == torch.int32 else values


def _check_dtypes(tensors: dict[str, Tensor]) -> None:
    for name, values in tensors.items():
        allowed = set(wire.DTYPES.values()) if name == "states" else {EXPECTED.get(name, torch.float32)}
        if values.dtype not in allowed:
            raise TeacherError(f"{name} came as {values.dtype}, which it never is")
