"""What the teacher server does not answer, whichever way it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

MOST_TOKENS = 2**18
"""Of one request; one sequence alone may be as long as the model reads."""
MOST_SEQUENCES = 2**12
MOST_DRAWN = 2**6
"""Sequences of one request that get one more token, each with a pass of its own: only checks ask for it."""


class RefusalError(Exception):
    """A request that is not answered: HTTP status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Limits(Protocol):
    """Of `serving_model.ServingModel`."""

    vocab_size: int
    max_length: int


def check_model(asked: Any, name: str) -> None:
    if asked not in (None, name):
        raise RefusalError(404, f"the model {asked!r} is not here, only {name!r}")


def check_amount(count: int, tokens: int, *, draw: bool = False) -> None:
    """A request that one client may make: others wait for it."""
    if count > MOST_SEQUENCES or (tokens > MOST_TOKENS and count > 1):
        raise RefusalError(
            413,
            f"the request has {count} sequences of {tokens} tokens; at most {MOST_SEQUENCES} sequences and {MOST_TOKENS} "
            "tokens are taken at a time: send several smaller ones (teacher.tokens_per_request)",
        )
    if draw and count > MOST_DRAWN:
        raise RefusalError(413, f"{count} sequences want one more token; at most {MOST_DRAWN} are drawn at a time")


def check_ids(ids: Sequence[int], model: Limits) -> None:
    """Ids that the model has, in a sequence that it has room for."""
    wrong = next((i for i in ids if not 0 <= i < model.vocab_size), None)
    if wrong is not None:
        raise RefusalError(400, f"token id {wrong} is out of vocabulary: the model has {model.vocab_size} ids")
    if len(ids) + 1 > model.max_length:
        found = f"a prompt of {len(ids)} tokens and one more"
        raise RefusalError(400, f"{found} do not fit into the {model.max_length} of the model")
