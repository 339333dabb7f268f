"""The client of teacher servers against a server that does everything wrong that a server can do."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hostile_teacher import hostile_teacher, truth
from iwopd.config import config_toml, make_config
from iwopd.config.engines import TeacherSource
from iwopd.teacher.checks import check_server
from iwopd.teacher.errors import TeacherError, TeacherGoneError
from iwopd.teacher.server import ServerScorer
from iwopd.types import Prompt, Rollout
from waiting import PATIENCE, wait_until

KEY = "sk-do-not-show-this"
VARIABLE = "TEST_TEACHER_KEY"


def rollouts(count: int = 6, length: int = 5) -> list[Rollout]:
    made = []
    for n in range(count):
        ids = torch.tensor([(n + k) % 20 for k in range(length + n % 3)])
        made.append(Rollout(Prompt(f"p{n}", (n + 1, 2, 3)), ids, torch.zeros(len(ids)), "length"))
    return made


def expected(rollout: Rollout) -> torch.Tensor:
    ids = [*rollout.prompt.token_ids, *rollout.response_ids.tolist()]
    return torch.tensor(truth(ids)[len(rollout.prompt.token_ids) - 1 :])


def scorer(*urls: str, **change: Any) -> ServerScorer:
    settings = {"tokens_per_request": 20, "request_timeout": 60.0, "patience": 300.0, "deadline": PATIENCE, **change}
    return ServerScorer(TeacherSource(urls=list(urls), **settings))


def assert_right(found: list[torch.Tensor], asked: list[Rollout]) -> None:
    assert len(found) == len(asked)
    for values, rollout in zip(found, asked, strict=True):
        assert values.dtype == torch.float32
        assert torch.allclose(values, expected(rollout), atol=1e-7), rollout.prompt.id


@pytest.mark.parametrize("mood", ["slow", "503", "500", "drop", "cut", "half", "silent", "drip", "reordered"])
def test_what_passes_is_waited_for(mood: str) -> None:
    asked = rollouts()
    with hostile_teacher([mood] * 2) as teacher:
        seconds = 1.0 if mood in ("silent", "drip") else 60.0
        assert_right(scorer(teacher.url, request_timeout=seconds).score(asked), asked)
        assert len(teacher.requests) >= 3 + (0 if mood in ("slow", "reordered") else 2)


@pytest.mark.parametrize(
    ("mood", "message"),
    [
        ("NaN", "the log-prob at position 9 is nan"),
        ("null", "the log-prob at position 9 is NoneType None"),
        ("positive", "is 0.7: it must be at most 0"),
        ("missing token", "10 ids were sent, the answer has 9 prompt_logprobs"),
        ("one missing inside", "there is no log-prob of id 12 at position 8"),
        ("off by one", "the answer is shifted"),
        ("wrong ids", "the ids in the answer are not those that were sent"),
        ("no echo", "return_token_ids"),
        ("missing choice", "2 sequences were sent, the answer has choices"),
        ("same index twice", "2 sequences were sent, the answer has choices"),
        ("a list", "no usable 'choices'"),
        ("huge", "more than"),
        ("400", "HTTP 400"),
        ("404", "HTTP 404"),
        ("429", "HTTP 429"),
        ("401", "name the key's variable: teacher.api_key_env"),
        ("302", "HTTP 302"),
    ],
)
def test_what_is_wrong_is_an_error_at_once(mood: str, message: str) -> None:
    asked = [Rollout(Prompt(f"p{n}", (1, 2, 3)), torch.arange(7, 14), torch.zeros(7), "eos") for n in range(2)]
    with hostile_teacher([mood]) as teacher:
        with pytest.raises(TeacherError, match=message) as error:
            scorer(teacher.url).score(asked)
        assert teacher.url in str(error.value)
        assert not isinstance(error.value, TeacherGoneError)
        assert len(teacher.requests) == 1  # it was not asked again


@pytest.mark.parametrize("mood", ["always half", "always deep"])
def test_what_is_never_json_ends_after_three_tries(mood: str) -> None:
    with hostile_teacher([mood]) as teacher, pytest.raises(TeacherError, match="responded 3 times with what is not JSON"):
        scorer(teacher.url, patience=60.0).score(rollouts(1))


@pytest.mark.parametrize("mood", ["always 503", "always drop", "always silent"])
def test_a_teacher_that_is_gone_is_given_up_after_patience(mood: str) -> None:
    began = time.monotonic()
    with (
        hostile_teacher([mood]) as teacher,
        pytest.raises(TeacherGoneError, match=r"did not answer for 1 s \(teacher.patience"),
    ):
        scorer(teacher.url, patience=1.0, request_timeout=0.4).score(rollouts())
    assert time.monotonic() - began >= 1.0


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(TeacherGoneError, match="ConnectError"):
            scorer(url, patience=0.5).score(rollouts())


def test_the_deadline_ends_a_teacher_that_is_only_slow() -> None:
    with hostile_teacher(["slow"] * 50) as teacher:
        quick = scorer(teacher.url, deadline=0.5, max_in_flight=1, tokens_per_request=1)
        with pytest.raises(TeacherGoneError, match=r"teacher\.deadline"):
            quick.score(rollouts(20))


def test_requests_in_flight_are_bounded() -> None:
    asked = rollouts(24)
    with hostile_teacher(["slow"] * 24) as teacher:
        assert_right(scorer(teacher.url, max_in_flight=3, tokens_per_request=1).score(asked), asked)
        assert len(teacher.requests) == 24
        assert teacher.most_busy == 3


def test_a_token_that_cannot_come_is_minus_infinity() -> None:
    with hostile_teacher(["impossible"]) as teacher:
        [values] = scorer(teacher.url).score(rollouts(1))
    assert values[-1] == -math.inf
    assert torch.isfinite(values[:-1]).all()


def test_short_sequences_travel_together_and_empty_answers_not_at_all() -> None:
    asked = [*rollouts(6), Rollout(Prompt("none", (1,)), torch.empty(0, dtype=torch.long), torch.empty(0), "length")]
    with hostile_teacher() as teacher:
        found = scorer(teacher.url, tokens_per_request=20).score(asked)
        assert_right(found[:-1], asked[:-1])
        assert len(found[-1]) == 0
        assert sorted(len(prompts) for prompts in teacher.requests) == [2, 2, 2]


def test_replicas_share_the_work_and_a_dead_one_is_left_out() -> None:
    asked = rollouts(40)
    with hostile_teacher(["slow"] * 99) as one, hostile_teacher(["slow"] * 99) as two, hostile_teacher(["always 503"]) as dead:
        shared = scorer(one.url, two.url, dead.url, tokens_per_request=1, max_in_flight=2)
        assert_right(shared.score(asked), asked)
        assert min(len(one.requests), len(two.requests)) >= 8
        before = len(dead.requests)
        assert before < 15
        assert_right(shared.score(asked[:4]), asked[:4])
        assert len(dead.requests) - before <= 3  # it rests from one call to the next


def test_a_server_that_comes_back_is_used_again() -> None:
    asked = rollouts()
    said: list[str] = []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    patient = scorer(f"http://127.0.0.1:{port}", patience=PATIENCE, deadline=PATIENCE)
    patient.servers.notify = said.append
    results: list[list[torch.Tensor]] = []
    thread = threading.Thread(target=lambda: results.append(patient.score(asked)))
    thread.start()
    wait_until(lambda: said, "a word about the server that is away")
    with hostile_teacher(port=port):
        thread.join(timeout=PATIENCE)
    assert_right(results[0], asked)
    assert any("does not answer" in text for text in said)
    assert any("answers again" in text for text in said)


def test_the_key_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    said: list[str] = []
    with hostile_teacher(["503", "503", "503", "503", "honest"]) as teacher:
        keyed = scorer(teacher.url, api_key_env=VARIABLE)
        keyed.servers.notify = said.append
        keyed.score(rollouts(1))
        assert set(teacher.keys) == {f"Bearer {KEY}"}
        assert said
    texts = [*said, repr(keyed.settings), repr(keyed)]
    for mood in ("401", "400", "always 503"):  # this server repeats the key in its words
        with hostile_teacher([mood]) as teacher, pytest.raises(TeacherError) as error:
            scorer(teacher.url, api_key_env=VARIABLE, patience=0.3).score(rollouts(1))
        assert "[key]" in str(error.value)
        texts += [str(error.value), repr(error.value)]
    assert "the key in TEST_TEACHER_KEY is wrong" in "".join(texts)
    config = make_config({"models": {"world": "clean"}, "teacher": {"urls": ["http://h:1"], "api_key_env": VARIABLE}})
    texts += [config_toml(config), repr(config), "".join(capfd.readouterr())]
    assert not any(KEY in text for text in texts)


@pytest.mark.parametrize("value", ["", "two words", "line\nbreak", "ünicode"])
def test_a_key_that_cannot_be_one_is_refused_unseen(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with hostile_teacher() as teacher, pytest.raises(TeacherError, match=VARIABLE) as error:
        scorer(teacher.url, api_key_env=VARIABLE).score(rollouts(1))
    assert not value or value not in str(error.value)


def test_it_works_inside_a_running_event_loop() -> None:
    asked = rollouts(2)

    async def notebook(url: str) -> list[torch.Tensor]:
        return scorer(url).score(asked)

    with hostile_teacher() as teacher, ThreadPoolExecutor(1) as thread:  # this thread may have a loop of its own: a browser's
        assert_right(thread.submit(lambda: asyncio.run(notebook(teacher.url))).result(), asked)


def check(teacher: Any, **change: Any) -> None:
    given = {"vocab_size": 21, "longest": 100, "examples": [(1, 2, 3), (4, 5)], **change}
    check_server(scorer(teacher.url, name=given.pop("model", None)), **given)


def test_a_good_server_passes_the_check() -> None:
    with hostile_teacher() as teacher:
        check(teacher)
        check(teacher, model="hostile", longest=999)
        assert [0, 20] in teacher.requests[0]  # the largest id was tried
    with hostile_teacher(card={}) as teacher:
        check(teacher)  # it does not tell what it serves


@pytest.mark.parametrize(
    ("script", "card", "change", "message"),
    [
        ([], None, {"model": "another"}, "serves hostile, not 'another': say with teacher.name"),
        ([], None, {"longest": 1000}, "takes 1000 tokens"),
        ([], {"id": "m", "vocab_size": 20}, {}, "has 20 ids, the tokenizer that it is asked with 21"),
        (["400"], None, {}, "the largest id of the tokenizer that it is asked with, 20, cannot be scored"),
        (["honest", "honest", "shifted values"], None, {}, "its scores are shifted by a token"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_before_training(
    script: list[str], card: dict[str, Any] | None, change: dict[str, Any], message: str
) -> None:
    with hostile_teacher(script, card=card) as teacher, pytest.raises(TeacherError, match=message):
        check(teacher, **change)
