"""What the teacher server does not answer, whichever way it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


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


def check_ids(ids: Sequence[int], model: Limits) -> None:
    """Ids that the model has, in a sequence that it has room for."""
    wrong = next((i for i in ids if not 0 <= i < model.vocab_size), None)
    if wrong is not None:
        raise RefusalError(400, f"token id {wrong} is out of vocabulary: the model has {model.vocab_size} ids")
    if len(ids) + 1 > model.max_length:
        found = f"a prompt of {len(ids)} tokens and one more"
        raise RefusalError(400, f"{found} do not fit into the {model.max_length} of the model")
