"""The part of the teacher server that says more than log-probs (`wire`): reading questions, bounding them, writing answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from iwopd.algo.views import NO_ID, TokenScores, Wanted, joined_scores
from iwopd.config.distributions import MOST_IDS
from iwopd.http_clients import GarbledError
from iwopd.teacher import wire
from iwopd.teacher.questions import TokenSequence
from iwopd.teacher.refusals import RefusalError, check_amount, check_ids, check_model
from iwopd.teacher.serving_model import ServingModel

NOT_THE_MATRIX = (
    "this model's logits are more than its output matrix (a soft cap or a scale), so hidden states do not give its "
    "distributions: ask for likeliest or chosen ids instead"
)


def answer_scores(content: bytes, name: str, model: ServingModel, abandoned: Callable[[], bool] = lambda: False) -> bytes:
    """What is wanted of the sequences in a request, unless its client has left."""
    try:
        tensors, about = wire.unpack(content)
    except GarbledError as error:
        raise RefusalError(400, f"the request is {error}") from None
    check_model(about.get("model"), name)
    wanted = _wanted(tensors, about, model)
    sequences = _sequences(tensors, model)
    tokens = sum(len(sequence.answer) for sequence in sequences)
    width = tensors["chosen"].shape[1] if wanted.chosen else 0
    hidden = model.matrix[0].shape[1] if wanted.states else 0
    item = 2 if model.half_states else 4
    size = tokens * wire.answer_bytes(wanted, chosen=width, hidden=hidden, item=item)
    if size > wire.MOST_ANSWER:
        raise RefusalError(
            413, f"the answer would have {size} bytes, at most {wire.MOST_ANSWER} are sent: ask for fewer tokens at a time"
        )
    found = joined_scores(model.score(sequences, wanted, abandoned=abandoned).scores)
    about = {"model": name, "vocab_size": model.vocab_size, "matrix": model.matrix[0].sha256 if wanted.states else None}
    return wire.pack({"ids": tensors["ids"], "lengths": tensors["lengths"], **_written(found, model)}, about)


def answer_matrix(request: Any, name: str, model: ServingModel) -> bytes:
    """Rows of the output matrix, and what it is as a whole."""
    if not isinstance(request, dict):
        raise RefusalError(400, "a request is a JSON object")
    check_model(request.get("model"), name)
    if not model.scorer.lm.fused:
        raise RefusalError(422, NOT_THE_MATRIX)
    facts, weight, bias = model.matrix
    rows = request.get("rows")
    if not isinstance(rows, list) or [type(row) for row in rows] != [int, int] or not 0 <= rows[0] <= rows[1] <= len(weight):
        raise RefusalError(400, f"rows is {rows!r}: it must be [first, last] within the {len(weight)} rows of the matrix")
    if (rows[1] - rows[0]) * facts.shape[1] * facts.item > max(wire.BLOCK, facts.shape[1] * facts.item):
        raise RefusalError(413, f"rows {rows} are more than {wire.BLOCK} bytes: ask for fewer at a time")
    tensors = {"weight": weight[rows[0] : rows[1]].cpu()}
    if bias is not None:
        tensors["bias"] = bias[rows[0] : rows[1]].cpu()
    about = {"shape": facts.shape, "dtype": facts.dtype, "bias": facts.bias, "precision": facts.precision}
    return wire.pack(tensors, {**about, "sha256": facts.sha256})


def _wanted(tensors: dict[str, Tensor], about: dict[str, Any], model: ServingModel) -> Wanted:
    entropy, top_k, states = about.get("entropy", False), about.get("top_k", 0), about.get("states", False)
    most = min(MOST_IDS, model.vocab_size)
    if type(top_k) is not int or not 0 <= top_k <= most:
        raise RefusalError(400, f"top_k is {top_k!r}; this server gives up to {most} likeliest ids")
    if type(entropy) is not bool or type(states) is not bool:
        raise RefusalError(400, f"entropy and states must be true or false, not {entropy!r} and {states!r}")
    if states and not model.scorer.lm.fused:
        raise RefusalError(422, NOT_THE_MATRIX)
    chosen = tensors.get("chosen")
    if chosen is not None and (chosen.dim() != 2 or not 1 <= chosen.shape[1] <= MOST_IDS):
        raise RefusalError(400, f"chosen ids have shape {list(chosen.shape)}; up to {MOST_IDS} are taken for each token")
    return Wanted(entropy, top_k, chosen is not None, states)


def _sequences(tensors: dict[str, Tensor], model: ServingModel) -> list[TokenSequence]:
    for name in ("ids", "lengths", "starts", *(["chosen"] if "chosen" in tensors else [])):
        if name not in tensors or tensors[name].dtype != torch.int32:
            raise RefusalError(400, f"a request needs {name} as int32")
    check_amount(tensors["lengths"].numel(), tensors["ids"].numel())
    ids, lengths, starts = (tensors[name].flatten().tolist() for name in ("ids", "lengths", "starts"))
    if not lengths or len(starts) != len(lengths) or min(lengths) < 1 or sum(lengths) != len(ids):
        raise RefusalError(400, f"{len(ids)} ids, {len(lengths)} lengths and {len(starts)} starts do not make sequences")
    if not all(1 <= start < length for start, length in zip(starts, lengths, strict=True)):
        raise RefusalError(400, "every sequence needs a start of at least 1, before its last token")
    counts = [length - start for start, length in zip(starts, lengths, strict=True)]
    chosen = tensors.get("chosen")
    if chosen is not None and (len(chosen) != sum(counts) or bool((chosen < NO_ID).any() | (chosen >= model.vocab_size).any())):
        raise RefusalError(
            400, f"chosen ids are for {len(chosen)} tokens of {sum(counts)}, or not among the {model.vocab_size} of the model"
        )
    given: list[Tensor | None] = [None] * len(counts) if chosen is None else list(chosen.long().split(counts))
    found, first = [], 0
    for length, start, one, more in zip(lengths, starts, given, _more(tensors, len(lengths)), strict=True):
        part = ids[first : first + length]
        check_ids(part, model)
        found.append(TokenSequence(tuple(part), start, one, more))
        first += length
    return found


def _more(tensors: dict[str, Tensor], count: int) -> list[bool] | list[None]:
    """Of which sequences more will come; None: the request is about whole ones."""
    more = tensors.get("more")
    if more is None:
        return [None] * count
    if more.dtype != torch.int32 or more.shape != (count,):
        raise RefusalError(400, f"more is {more.dtype} {list(more.shape)}: it must be int32, one for each sequence")
    if "chosen" in tensors:
        raise RefusalError(400, "chosen ids are scored in whole sequences only, not in those that grow: leave `more` out")
    return [bool(one) for one in more.tolist()]


def _written(found: TokenScores, model: ServingModel) -> dict[str, Tensor]:
    """Scores as they travel."""
    tensors = {}
    for one in fields(found):
        values = getattr(found, one.name)
        if values is None:
            continue
        if one.name == "states":
            tensors[one.name] = wire.half_states(values) if model.half_states else values
        else:
            tensors[one.name] = values.to(torch.int32 if one.name == "top_ids" else torch.float32)
        if bool(tensors[one.name].isnan().any()):
            raise RefusalError(422, f"the model's {one.name} are not numbers: its weights may hold NaN")
    return tensors
