"""A real `TeacherServer` on this machine, in a thread of the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from iwopd.algo.views import NO_ID
from iwopd.config.engines import TeacherSource
from iwopd.teacher.server import ServerScorer
from iwopd.teacher.serving import TeacherServer
from iwopd.teacher.serving_model import ServingModel
from iwopd.types import Prompt, Rollout


@contextmanager
def served(model: Any, *, vocab_size: int = 21, **options: Any) -> Iterator[TeacherServer]:
    """A running server of a model; its `model` may be exchanged."""
    with TeacherServer("m", host="127.0.0.1", port=0, token=None) as server:
        server.model = ServingModel(model, vocab_size=vocab_size, max_length=256, **options)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def asking(*urls: str, **settings: Any) -> ServerScorer:
    """A client of servers that speak our dialect."""
    return ServerScorer(TeacherSource(urls=list(urls), **{"dialect": "iwopd", "patience": 10.0, **settings}))


def rollouts(count: int = 9, vocab: int = 21) -> list[Rollout]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        ids = torch.randint(vocab, (2 + 3 * (number % 4),), generator=generator)
        made.append(Rollout(Prompt(str(number), tuple(range(1, 3 + number % 5))), ids, torch.zeros(len(ids)), "length"))
    return made


def some_ids(asked: list[Rollout], width: int = 4, vocab: int = 21) -> list[Tensor]:
    """For each token some ids, among them the written one, one twice, and empty places."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for rollout in asked:
        ids = torch.randint(vocab, (len(rollout), width), generator=generator)
        ids[:, 0] = rollout.response_ids
        ids[::2, -1] = NO_ID
        found.append(ids)
    return found
