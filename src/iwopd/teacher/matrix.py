"""A teacher's output matrix over the wire: fetched once in blocks of rows, checked as a whole and against hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import torch

from iwopd.algo.head import Precision
from iwopd.algo.views import TokenScores, token_scores
from iwopd.teacher import wire
from iwopd.teacher.conversation import Request, Servers
from iwopd.teacher.errors import TeacherError
from iwopd.teacher.questions import TokenSequence
from iwopd.teacher.scorer import OutputMatrix

MOST_MATRIX = 2**35
"""Bytes: four times the largest that we know of (a vocabulary of 262,144 at size 16,384 in bfloat16)."""
CHECKED = 16
"""Tokens whose log-probs are computed again at a time: each costs a product with the whole matrix."""
TOLERANCE = 1e-2
TOLERANCE_HALF = 0.1
"""Largest difference between a log-prob that a server sends and the one that its states and matrix make. Rounding the states
changes log-probs by 0.001 in float16, by 0.01 in bfloat16 (`bench/wire.py`); another matrix changes them by several nats."""


def matrix_facts(servers: Servers, model: str | None) -> wire.MatrixFacts:
    """What the servers say about their output matrix; all replicas must have the same."""
    answers = servers.ask(wire.MATRIX, {"model": model, "rows": [0, 0]}, wire.unpack)
    found = {url: _facts(url, about) for url, (_, about) in answers.items()}
    if len(set(found.values())) > 1:
        told = "; ".join(f"{url}: {list(facts.shape)} {facts.dtype} {facts.sha256[:12]}" for url, facts in found.items())
        raise TeacherError(f"the replicas of one teacher have different output matrices: {told}")
    return next(iter(found.values()))


def _facts(url: str, about: dict[str, Any]) -> wire.MatrixFacts:
    shape, sha = about.get("shape", []), about.get("sha256")
    whole = isinstance(shape, list) and [type(size) for size in shape] == [int, int] and min(shape) > 0
    named = about.get("dtype") in wire.DTYPES and about.get("precision") in get_args(Precision)
    if not (whole and named) or not isinstance(sha, str) or type(about.get("bias")) is not bool:
        raise TeacherError(f"the teacher at {url} says of its output matrix what cannot be: {about}"[:300])
    facts = wire.MatrixFacts((shape[0], shape[1]), about["dtype"], about["bias"], about["precision"], sha)
    if facts.bytes > MOST_MATRIX:
        raise TeacherError(f"the teacher at {url} says that its output matrix has {facts.bytes} bytes: at most {MOST_MATRIX}")
    return facts


def fetch_matrix(servers: Servers, model: str | None, facts: wire.MatrixFacts, *, vocab_size: int | None) -> OutputMatrix:
    """The matrix, block by block into its place, from whichever replicas are free. `vocab_size`: ids that are used of it."""
    dtype = wire.DTYPES[facts.dtype]
    weight = torch.empty(facts.shape, dtype=dtype)
    bias = torch.empty(facts.shape[0], dtype=dtype) if facts.bias else None

    def fill(first: int, last: int, content: bytes) -> None:
        tensors, _ = wire.unpack(content)
        places = {"weight": weight[first:last]} | ({} if bias is None else {"bias": bias[first:last]})
        for name, place in places.items():
            values = tensors.get(name)
            if values is None or values.shape != place.shape or values.dtype != dtype:
                raise TeacherError(f"rows {first} to {last} of its output matrix are not {list(place.shape)} {facts.dtype}")
            place.copy_(values)

    requests = []
    for first, last in facts.blocks():
        body: Callable[[], Any] = partial(dict, model=model, rows=[first, last])
        most = wire.ENVELOPE + (last - first) * (facts.shape[1] + 1) * facts.item
        requests.append(Request(wire.MATRIX, body, partial(fill, first, last), most))
    servers.answers(requests)
    if wire.digest(weight, bias) != facts.sha256:
        raise TeacherError(f"{servers.who}'s output matrix arrived with another SHA-256 than was told ({facts.sha256[:12]}…)")
    used = vocab_size if vocab_size is not None and vocab_size < facts.shape[0] else None
    precision: Any = facts.precision
    return OutputMatrix(weight, bias, vocab_size=used, precision=precision)


def check_states(matrix: OutputMatrix, sequences: Sequence[TokenSequence], scores: Sequence[TokenScores]) -> None:
    """Log-probs of a few tokens, spread over the answers, made again of states and matrix, must be those that were sent."""
    states = [one.states for one in scores if one.states is not None]
    lengths = [len(one) for one in states]
    if sum(lengths) == 0:
        return
    chosen = torch.linspace(0, sum(lengths) - 1, min(CHECKED, sum(lengths))).long()
    ends = torch.tensor(lengths).cumsum(0)
    rows = torch.searchsorted(ends, chosen, right=True)
    places = [(int(row), int(place - (ends[row] - lengths[row]))) for row, place in zip(rows, chosen, strict=True)]
    ids = torch.tensor([sequences[row].answer[place] for row, place in places])
    sent = torch.stack([scores[row].logprobs[place] for row, place in places])
    given = torch.stack([states[row][place] for row, place in places])
    again = token_scores(given, matrix.weight, ids, bias=matrix.bias, precision=matrix.precision).logprobs
    tolerance = TOLERANCE if given.dtype == torch.float32 else TOLERANCE_HALF
    wrong = ~((again - sent).abs() <= tolerance) & (again != sent)  # both may be -inf
    if bool(wrong.any()):
        first = int(wrong.int().argmax())
        row, place = places[first]
        raise TeacherError(
            f"at position {sequences[row].start + place} the log-prob is {float(sent[first]):.3f}, but hidden state and output "
            f"matrix make {float(again[first]):.3f} of it: the states are those of other tokens, or of another matrix"
        )
