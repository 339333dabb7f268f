"""Servers that lie about distributions: each lie is found out by the client, with words that say what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from iwopd.algo.views import Wanted
from iwopd.teacher import server as scoring_client
from iwopd.teacher import serving, serving_scores, wire
from iwopd.teacher.errors import TeacherError
from iwopd.teacher.serving import TeacherServer
from models import make_model
from served_teacher import asking, rollouts, served, some_ids


@pytest.fixture(scope="module")
def server() -> Iterator[TeacherServer]:
    with served(make_model("llama", vocab=32)) as running:
        yield running


Lie = Callable[[dict[str, Any], dict[str, Any]], Any]


def shift(*names: str) -> Lie:
    def lie(tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        for name in names:
            tensors[name] = tensors[name].roll(1, 0).contiguous()

    return lie


def change(name: str, how: Callable[[Tensor], Tensor]) -> Lie:
    def lie(tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        tensors[name] = how(tensors[name].clone()).contiguous()

    return lie


def drop(name: str) -> Lie:
    return lambda tensors, about: tensors.pop(name)


def put(value: float, *place: int) -> Callable[[Tensor], Tensor]:
    def how(values: Tensor) -> Tensor:
        values[place] = value
        return values

    return how


def swapped(values: Tensor) -> Tensor:
    return values[:, [1, 0, *range(2, values.shape[1])]]


LIES: dict[str, tuple[Lie, str]] = {
    "likeliest ids of the token before": (
        shift("top_ids", "top_logprobs", "rest"),
        "two different log-probs|likelier than",
    ),
    "chosen log-probs of the token before": (shift("chosen_logprobs"), "two different log-probs|likelier than"),
    "log-probs of the token before": (shift("logprobs"), "two different log-probs"),
    "unsorted": (change("top_logprobs", swapped), "not in the order of their log-probs"),
    "an id twice": (change("top_ids", lambda ids: put(int(ids[0, 0]), 0, 1)(ids)), "an id is twice among the likeliest"),
    "ids beyond the vocabulary": (change("top_ids", put(21, 0, 3)), "no ids of the vocabulary"),
    "a negative id": (change("top_ids", put(-1, 0, 3)), "no ids of the vocabulary"),
    "other ids than the likeliest": (change("top_ids", lambda ids: (ids + 1) % 21), "two different log-probs|likeliest"),
    "a probability above 1": (change("top_logprobs", put(0.5, 0, 0)), "a number in top_logprobs is 0.5: it must be at most 0"),
    "a log-prob above 0": (change("logprobs", put(0.1, 0)), "a number in logprobs is 0.1"),
    "more than 1 in all": (change("rest", lambda rest: rest * 0 - 0.01), "sum to"),
    "less than 1 in all": (change("rest", lambda rest: rest * 0 - 23.0), "sum to"),
    "NaN": (change("logprobs", put(float("nan"), 0)), "a number in logprobs is nan"),
    "NaN among the chosen": (change("chosen_logprobs", put(float("nan"), 1, 1)), "a number in chosen_logprobs is nan"),
    "negative entropy": (change("entropy", put(-0.5, 0)), "the entropy is -0.5, outside"),
    "entropy beyond the uniform": (change("entropy", put(3.1, 0)), "the entropy is 3.09999"),
    "entropy too small for its likeliest id": (change("entropy", put(0.0, 0)), "the entropy is 0.0, outside"),
    "NaN entropy": (change("entropy", put(float("nan"), 0)), "the entropy is nan"),
    "a token less": (change("entropy", lambda values: values[1:]), r"entropy has shape \[\d+\], and \d+ tokens"),
    "fewer likeliest ids": (change("top_ids", lambda ids: ids[:, 1:]), r"top_ids should have shape \[\d+, 5\] and has shape"),
    "no likeliest ids": (drop("top_ids"), "top_ids should have shape .* and is not there"),
    "no log-probs": (drop("logprobs"), "logprobs is not there"),
    "no rest": (drop("rest"), "rest should have shape"),
    "float64": (change("rest", lambda values: values.double()), "rest came as torch.float64"),
    "other ids echoed": (change("ids", put(20, 0)), "the ids in the answer are not those that were sent"),
    "a sequence less": (change("lengths", lambda values: values[1:]), "2 sequences were sent, the answer has 1"),
    "no vocabulary": (lambda tensors, about: about.pop("vocab_size"), "does not say how many ids its model has"),
    "states of the token before": (shift("states"), "hidden state and output matrix make"),
    "states that are not finite": (change("states", put(float("inf"), 0, 0)), "the hidden state is not finite"),
    "states of another size": (change("states", lambda states: states[:, 1:]), "belong to another output matrix"),
    "states of another matrix": (lambda tensors, about: about.update(matrix="0" * 64), "belong to another output matrix"),
    "truncated": (lambda tensors, about: wire.pack(tensors, about)[:-10], "3 times with what is not in the format"),
    "not ours": (lambda tensors, about: b"<html>", "3 times with what is not in the format"),
    "no metadata": (lambda tensors, about: wire.pack(tensors, [about]), "its metadata are no object"),
    "huge": (lambda tensors, about: bytes(2**20), "far more than the question needs"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lying_server_is_found_out_and_told_what_is_wrong(
    name: str, server: TeacherServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie, words = LIES[name]
    honest = serving_scores.answer_scores

    def lying(*given: Any) -> bytes:
        tensors, about = wire.unpack(honest(*given))
        content = lie(tensors, about)
        return content if isinstance(content, bytes) else wire.pack(tensors, about)

    asked = rollouts(4)[2:]
    chosen = some_ids(asked)
    wanted = Wanted(entropy=True, top_k=5, chosen=True, states=True)
    assert asking(server.url).look(asked, wanted, chosen)
    monkeypatch.setattr(serving, "answer_scores", lying)
    with pytest.raises(TeacherError, match=words) as error:
        asking(server.url).look(asked, wanted, chosen)
    assert server.url in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors, about: tensors["weight"].add_(0.1) if len(tensors["weight"]) else None, "another SHA-256"),
        (lambda tensors, about: tensors.update(weight=tensors["weight"][:-1]), "of its output matrix are not"),
        (lambda tensors, about: tensors.update(weight=tensors["weight"].half()), "of its output matrix are not"),
        (lambda tensors, about: about.update(shape=[2**20, 2**20]), "bytes: at most"),
        (lambda tensors, about: about.update(shape=[0, 8]), "what cannot be"),
        (lambda tensors, about: about.update(dtype="float8"), "what cannot be"),
        (lambda tensors, about: about.update(precision="guess"), "what cannot be"),
    ],
)
def test_a_matrix_that_is_not_the_models_is_found_out(
    change: Any, words: str, server: TeacherServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = serving_scores.answer_matrix

    def lying(*given: Any) -> bytes:
        tensors, about = wire.unpack(honest(*given))
        change(tensors, about)
        return wire.pack(tensors, about)

    monkeypatch.setattr(serving, "answer_matrix", lying)
    with pytest.raises(TeacherError, match=words):
        asking(server.url).output_matrix()


def test_a_consistent_lie_about_the_matrix_does_not_fit_the_states(server: TeacherServer) -> None:
    """Another matrix with its own right SHA-256: the log-probs that came do not come out of it."""
    facts, weight, bias = server.model.matrix
    other = weight.flip(0)
    told = replace(facts, sha256=wire.digest(other, bias))
    server.model.__dict__["matrix"] = (told, other, bias)
    try:
        with pytest.raises(TeacherError, match="or of another matrix"):
            asking(server.url).look(rollouts(), Wanted(states=True))
    finally:
        server.model.__dict__["matrix"] = (facts, weight, bias)


def test_replicas_of_different_models_are_found_out(server: TeacherServer) -> None:
    with served(make_model("llama", vocab=32, seed=9)) as other:
        with pytest.raises(TeacherError, match="the replicas of one teacher have different output matrices"):
            asking(server.url, other.url).output_matrix()
        remote = asking(other.url)
        remote.look(rollouts(), Wanted(states=True))
        other.model = server.model  # it was started again with another model
        with pytest.raises(TeacherError, match="started again with another model"):
            remote.look(rollouts(), Wanted(states=True))


def test_states_are_checked_again_and_again(server: TeacherServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring_client, "STATES_APART", 20)
    remote, asked, honest = asking(server.url), rollouts(4), serving_scores.answer_scores
    remote.look(asked, Wanted(states=True))

    def lying(*given: Any) -> bytes:
        tensors, about = wire.unpack(honest(*given))
        tensors["states"] = tensors["states"].roll(1, 0).contiguous()
        return wire.pack(tensors, about)

    monkeypatch.setattr(serving, "answer_scores", lying)
    assert remote.look(asked[:2], Wanted(states=True))  # seven tokens: not yet
    with pytest.raises(TeacherError, match="hidden state and output matrix make"):
        remote.look(asked, Wanted(states=True))
