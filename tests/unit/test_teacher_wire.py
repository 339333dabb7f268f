"""Distributions over the wire: what a real server of a real small model says is what the model says, and lies are found out."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from iwopd import algo
from iwopd.algo.views import NO_ID, TokenScores, Wanted
from iwopd.http_clients import GarbledError
from iwopd.teacher import serving_scores, wire
from iwopd.teacher.errors import TeacherError
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.own_dialect import OwnDialect
from iwopd.teacher.prompted import PromptedScorer
from iwopd.teacher.questions import TokenSequence
from iwopd.teacher.refusals import RefusalError
from iwopd.teacher.router import RoutedScorer
from iwopd.teacher.scorer import OutputMatrix
from iwopd.teacher.server import known_ids
from iwopd.teacher.serving import TeacherServer
from iwopd.teacher.serving_model import ServingModel
from iwopd.types import Prompt, Rollout
from models import make_model
from served_teacher import asking, rollouts, served, some_ids

HALF_ERROR = 1e-3
"""Largest error of a token's KL that float16 states may cause; docs/teachers.md has what is measured."""
EVIDENCE = Wanted(entropy=True, top_k=5, chosen=True)


def assert_same(ours: TokenScores, theirs: TokenScores, chosen: Tensor, tolerance: float = 1e-5) -> None:
    for name in ("logprobs", "entropy", "top_logprobs", "rest"):
        assert torch.allclose(getattr(ours, name), getattr(theirs, name), atol=tolerance), name
    assert torch.equal(ours.top_ids, theirs.top_ids)
    real = chosen != NO_ID
    assert ours.chosen_logprobs is not None
    assert theirs.chosen_logprobs is not None
    assert torch.allclose(ours.chosen_logprobs[real], theirs.chosen_logprobs[real], atol=tolerance)


@pytest.fixture(scope="module")
def server() -> Iterator[TeacherServer]:
    """A model with 32 output rows of which 21 are ids."""
    with served(make_model("llama", vocab=32)) as running:
        yield running


def local(server: TeacherServer) -> LocalScorer:
    return server.model.scorer


# --- what is said is what the model says -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "gemma2"])
def test_entropies_likeliest_and_chosen_ids_are_those_of_the_model(kind: str) -> None:
    """Also of a model whose logits are more than its output matrix."""
    asked = rollouts()
    chosen = some_ids(asked)
    with served(make_model(kind, vocab=32)) as running:
        here = LocalScorer(make_model(kind, vocab=32), vocab_size=21)
        here.lm.fused = running.model.scorer.lm.fused
        found = asking(running.url, tokens_per_request=20).look(asked, EVIDENCE, chosen)
        for ours, theirs, ids in zip(found, here.look(asked, EVIDENCE, chosen), chosen, strict=True):
            assert_same(ours, theirs, ids)


@pytest.mark.parametrize("wanted", [Wanted(), Wanted(entropy=True), Wanted(top_k=21), Wanted(chosen=True)])
def test_each_kind_can_be_asked_for_alone(server: TeacherServer, wanted: Wanted) -> None:
    asked = rollouts()
    chosen = some_ids(asked) if wanted.chosen else None
    for ours, theirs in zip(
        asking(server.url).look(asked, wanted, chosen), local(server).look(asked, wanted, chosen), strict=True
    ):
        assert {name for name, value in vars(ours).items() if value is not None} == {
            name for name, value in vars(theirs).items() if value is not None
        }
        assert torch.allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
        if ours.rest is not None and theirs.rest is not None:
            assert torch.allclose(ours.rest, theirs.rest, atol=1e-4)


def test_plain_scores_are_the_same_in_both_dialects_of_our_server(server: TeacherServer) -> None:
    asked = rollouts()
    binary, text = asking(server.url).score(asked), asking(server.url, dialect="vllm").score(asked)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(binary, text, strict=True))


def test_questions_of_different_kinds_at_the_same_time_are_answered_each_for_itself(server: TeacherServer) -> None:
    asked = rollouts()
    kinds = [Wanted(), Wanted(entropy=True), Wanted(top_k=3), Wanted(top_k=4), Wanted(chosen=True), Wanted(states=True)] * 3
    given = [some_ids(asked, width=2 + n % 2) if wanted.chosen else None for n, wanted in enumerate(kinds)]
    with ThreadPoolExecutor(len(kinds)) as threads:
        found = list(threads.map(lambda pair: asking(server.url).look(asked, *pair), zip(kinds, given, strict=True)))
    for wanted, ids, answers in zip(kinds, given, found, strict=True):
        for ours, theirs in zip(answers, local(server).look(asked, wanted, ids), strict=True):
            assert torch.allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
            assert (ours.top_ids is None) == (theirs.top_ids is None)
            assert ours.top_ids is None or torch.equal(ours.top_ids, theirs.top_ids)


def test_a_server_with_a_token_says_nothing_without_it() -> None:
    with served(make_model("qwen3")) as running:
        running.token = "secret"
        for ask in (lambda: asking(running.url).look(rollouts(), Wanted(entropy=True)), asking(running.url).output_matrix):
            with pytest.raises(TeacherError, match="it denies access"):
                ask()


def test_empty_answers_have_all_that_was_wanted(server: TeacherServer) -> None:
    none = Rollout(Prompt("none", (1,)), torch.empty(0, dtype=torch.long), torch.empty(0), "length")
    wanted = Wanted(entropy=True, top_k=5, chosen=True, states=True)
    first, empty = asking(server.url).look([rollouts(1)[0], none], wanted, [some_ids(rollouts(1))[0], torch.empty(0, 4).long()])
    for name, values in vars(first).items():
        if name == "spans":  # of teachers with another tokenizer only
            continue
        assert getattr(empty, name).shape == (0, *values.shape[1:]), name


def kl(student: TokenScores, matrix: OutputMatrix, teacher: TokenScores, other: OutputMatrix) -> Tensor:
    assert student.states is not None
    assert teacher.states is not None
    return algo.token_kl(
        student.states, matrix.weight, teacher.states, other.weight, bias=matrix.bias, teacher_bias=other.bias, vocab_size=21
    )


@pytest.mark.parametrize(("half", "error"), [(True, HALF_ERROR), (False, 1e-6)])
def test_kl_from_states_over_the_wire_is_the_models(half: bool, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BLOCK", 2**10)  # the matrix comes in three blocks
    asked = rollouts()
    student, wanted = LocalScorer(make_model("qwen3", hidden=16, seed=3), vocab_size=21), Wanted(states=True)
    with served(make_model("gpt2", vocab=32), half_states=half) as running:
        remote = asking(running.url)
        matrix = remote.output_matrix()
        assert matrix.weight.shape == (21, 32)
        pairs = zip(student.look(asked, wanted), remote.look(asked, wanted), local(running).look(asked, wanted), strict=True)
        for ours, theirs, exact in pairs:
            assert theirs.states is not None
            assert theirs.states.dtype == (torch.float16 if half else torch.float32)
            found = kl(ours, student.output_matrix(), theirs, matrix)
            right = kl(ours, student.output_matrix(), exact, local(running).output_matrix())
            assert torch.allclose(found, right, atol=error)
        assert remote.output_matrix() is matrix  # fetched once


def test_states_of_a_model_in_half_precision_arrive_as_they_are() -> None:
    asked, wanted = rollouts(3), Wanted(states=True)
    with served(make_model("llama").to(torch.bfloat16)) as running:
        remote = asking(running.url)
        for ours, theirs in zip(remote.look(asked, wanted), local(running).look(asked, wanted), strict=True):
            assert ours.states is not None
            assert ours.states.dtype == torch.bfloat16
            assert torch.equal(ours.states, theirs.states)
        assert torch.equal(remote.output_matrix().weight, local(running).output_matrix().weight)
        assert remote.output_matrix().precision == "tf32"


def test_states_too_large_for_float16_keep_their_range() -> None:
    assert wire.half_states(torch.tensor([[1.0, 70_000.0]])).dtype == torch.bfloat16
    assert wire.half_states(torch.tensor([[1.0, 60_000.0]])).dtype == torch.float16


def test_an_id_that_the_student_does_not_have_belongs_to_the_rest() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0]])
    found = known_ids(algo.scores_of_logits(logits.clone()[:, [1, 2, 3, 0, 4]], torch.tensor([0]), Wanted(top_k=3)), 3)
    assert found.top_ids is not None
    assert found.top_logprobs is not None
    assert found.rest is not None
    assert found.top_ids.tolist() == [[0, 1, NO_ID]]
    assert float(found.top_logprobs.exp().sum() + found.rest.exp()) == pytest.approx(1.0, abs=1e-6)


# --- teachers around a server ----------------------------------------------------------------------------------------


def test_a_teacher_with_its_own_prompt_gives_all_that_the_one_inside_gives(server: TeacherServer) -> None:
    inner = asking(server.url)
    scorer = PromptedScorer(inner, lambda prompt: Prompt(prompt.id, (7, 8, 9)))
    [asked] = rollouts(1)
    asked = Rollout(Prompt("p", (1, 2), metadata={"messages": []}), asked.response_ids, asked.rollout_logprobs, "length")
    [ours] = scorer.look([asked], Wanted(entropy=True))
    moved = Rollout(Prompt("p", (7, 8, 9)), asked.response_ids, asked.rollout_logprobs, "length")
    [theirs] = local(server).look([moved], Wanted(entropy=True))
    assert ours.entropy is not None
    assert theirs.entropy is not None
    assert torch.allclose(ours.entropy, theirs.entropy, atol=1e-5)
    assert scorer.gives == inner.gives
    assert scorer.output_matrix() is inner.output_matrix()


def test_several_teachers_give_what_all_of_them_give(server: TeacherServer) -> None:
    here = LocalScorer(make_model("qwen3"), vocab_size=21)
    router = RoutedScorer({None: asking(server.url), "math": here, "old": asking(server.url, dialect="vllm")})
    assert router.gives == {"top-k"}
    with pytest.raises(TeacherError, match="3 teachers, each with an output matrix of its own"):
        router.output_matrix()
    router = RoutedScorer({None: asking(server.url), "math": here})
    assert router.gives == here.gives
    one, two = rollouts(2)
    two = Rollout(Prompt("m", (1, 2), teacher="math"), two.response_ids, two.rollout_logprobs, "length")
    chosen = some_ids([two, one])
    for ours, (scorer, asked), ids in zip(
        router.look([two, one], EVIDENCE, chosen), [(here, two), (local(server), one)], chosen, strict=True
    ):
        assert_same(ours, scorer.look([asked], EVIDENCE, [ids])[0], ids)


# --- what is refused -------------------------------------------------------------------------------------------------


def ask_wrongly(server: TeacherServer, about: dict[str, Any], **change: Tensor | None) -> None:
    tensors = {"ids": torch.tensor([1, 2, 3, 4]), "lengths": torch.tensor([4]), "starts": torch.tensor([2])}
    tensors |= {name: values for name, values in change.items() if values is not None}
    content = wire.pack({name: values.int() for name, values in tensors.items() if name not in about.get("drop", [])}, about)
    serving_scores.answer_scores(content, "m", server.model)


@pytest.mark.parametrize(
    ("about", "change", "words"),
    [
        ({"top_k": 22}, {}, "top_k is 22; this server gives up to 21 likeliest ids"),
        ({"top_k": -1}, {}, "top_k is -1"),
        ({"top_k": True}, {}, "top_k is True"),
        ({"entropy": 1}, {}, "must be true or false"),
        ({"model": "other"}, {}, "'other' is not here, only 'm'"),
        ({}, {"chosen": torch.zeros(1, 4)}, "chosen ids are for 1 tokens of 2"),
        ({}, {"chosen": torch.zeros(2, 2000)}, "up to 1024 are taken for each token"),
        ({}, {"chosen": torch.zeros(2)}, "chosen ids have shape"),
        ({}, {"chosen": torch.full((2, 4), 21)}, "not among the 21 of the model"),
        ({}, {"chosen": torch.full((2, 4), -2)}, "not among the 21 of the model"),
        ({}, {"ids": torch.tensor([1, 2, 3, 21])}, "token id 21 is out of vocabulary"),
        ({}, {"ids": torch.ones(256), "lengths": torch.tensor([256])}, "do not fit into the 256"),
        ({}, {"starts": torch.tensor([4])}, "before its last token"),
        ({}, {"starts": torch.tensor([0])}, "a start of at least 1"),
        ({}, {"lengths": torch.tensor([5])}, "do not make sequences"),
        ({}, {"lengths": torch.tensor([], dtype=torch.int32)}, "do not make sequences"),
        ({"drop": ["starts"]}, {}, "a request needs starts as int32"),
    ],
)
def test_our_server_refuses_what_it_cannot_do(
    about: dict[str, Any], change: dict[str, Tensor], words: str, server: TeacherServer
) -> None:
    ask_wrongly(server, {}, chosen=torch.zeros(2, 4))  # as it should be
    with pytest.raises(RefusalError, match=words):
        ask_wrongly(server, about, **change)


def test_an_answer_that_would_be_too_long_is_not_begun(server: TeacherServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MOST_ANSWER", 100)
    with pytest.raises(TeacherError, match="at most 100 are sent: ask for fewer tokens at a time"):
        asking(server.url).look(rollouts(), Wanted(top_k=5))


@pytest.mark.parametrize("rows", [None, [0], [0, 22], [5, 4], [-1, 4], [0, True], "all"])
def test_rows_that_are_not_there_are_refused(rows: Any, server: TeacherServer) -> None:
    with pytest.raises(RefusalError, match="within the 21 rows"):
        serving_scores.answer_matrix({"rows": rows}, "m", server.model)


def test_a_model_whose_logits_are_more_than_its_matrix_gives_no_states() -> None:
    with served(make_model("gemma2")) as running:
        remote = asking(running.url)
        with pytest.raises(TeacherError, match=r"does not give what the method asks for.*a soft cap or a scale"):
            remote.try_out([Prompt("a", (1, 2))], vocab_size=21, max_tokens=4, wanted=Wanted(states=True))
        remote.try_out([Prompt("a", (1, 2))], vocab_size=21, max_tokens=4, wanted=Wanted(top_k=4, chosen=True))


def test_what_training_will_ask_for_is_asked_before_it(server: TeacherServer) -> None:
    prompts = [Prompt("a", (1, 2)), Prompt("b", (3,))]
    everything = Wanted(entropy=True, top_k=21, chosen=True, states=True)
    asking(server.url).try_out(prompts, vocab_size=21, max_tokens=4, wanted=everything)
    with pytest.raises(TeacherError, match=r"\(likeliest ids \(top-k\), k = 30\).*gives up to 21 likeliest ids"):
        asking(server.url).try_out(prompts, vocab_size=21, max_tokens=4, wanted=Wanted(top_k=30))
    with pytest.raises(TeacherError, match="such servers give log-probs of the written tokens, likeliest ids"):
        asking(server.url, dialect="vllm").try_out(prompts, vocab_size=21, max_tokens=4, wanted=everything)
    with pytest.raises(TeacherError, match=r"teacher\.dialect = 'iwopd'"):  # our server speaks vllm for log-probs only
        asking(server.url, dialect="vllm").try_out(prompts, vocab_size=21, max_tokens=4, wanted=Wanted(top_k=3))


def test_a_broken_model_says_so() -> None:
    model = make_model("qwen3")
    serving_model = ServingModel(model, vocab_size=21, max_length=64)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    content = asking("http://h").dialect.scoring("m", [TokenSequence((1, 2, 3), 1)])
    with pytest.raises(RefusalError, match="are not numbers"):
        serving_scores.answer_scores(content, "m", serving_model)


# --- the format ------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=200), st.integers(0, 300), st.integers(0, 255))
def test_what_is_not_in_the_format_is_never_anything_else(noise: bytes, place: int, value: int) -> None:
    """Whole content comes back as it was; noise, cuts and changed bytes are `GarbledError`s or other numbers, nothing worse."""
    content = wire.pack({"ids": torch.arange(4), "states": torch.ones(2, 3, dtype=torch.bfloat16)}, {"model": "m"})
    tensors, about = wire.unpack(content)
    assert torch.equal(tensors["ids"], torch.arange(4))
    assert tensors["states"].dtype == torch.bfloat16
    assert about == {"model": "m"}
    changed = bytearray(content)
    changed[place % len(content)] = value
    for bad in (noise, content[: place % len(content)], bytes(changed), content + noise):
        try:
            wire.unpack(bad)
        except GarbledError:
            continue
        assert len(bad) == len(content)  # only numbers can have changed


@pytest.mark.parametrize("wanted", [Wanted(), EVIDENCE, Wanted(states=True), Wanted(top_k=21)])
def test_the_bytes_of_an_answer_are_those_that_are_stated(wanted: Wanted, server: TeacherServer) -> None:
    """An answer of 100 tokens more is longer by 100 times `answer_bytes`, up to digits and padding in the header."""
    dialect, sizes = OwnDialect(), []
    for tokens in (100, 200):
        sequence = TokenSequence((1,) * (tokens + 1), 1, torch.zeros(tokens, 4).long() if wanted.chosen else None)
        sizes.append(len(serving_scores.answer_scores(dialect.scoring("m", [sequence], wanted), "m", server.model)))
    assert abs(sizes[1] - sizes[0] - 100 * wire.answer_bytes(wanted, chosen=4, hidden=32)) <= 64
