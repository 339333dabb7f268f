"""`iwopd serve-teacher` and requests that are too large, or that nobody waits for any more. A real server on this machine."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from iwopd.teacher import wire
from iwopd.teacher.refusals import MOST_DRAWN, MOST_SEQUENCES, MOST_TOKENS
from iwopd.teacher.serving import TeacherServer
from models import make_model
from served_teacher import served
from waiting import PATIENCE


@pytest.fixture(scope="module")
def server() -> Iterator[TeacherServer]:
    with served(make_model("qwen3").eval()) as running:
        yield running


def request(server: TeacherServer, body: bytes, path: str = "/v1/completions") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(str(urlsplit(server.url).netloc), timeout=PATIENCE)
    try:
        connection.request("POST", path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def question(prompt: Any, **more: Any) -> bytes:
    return json.dumps(
        {"model": "m", "prompt": prompt, "max_tokens": 0, "temperature": 1, "prompt_logprobs": 0, **more}
    ).encode()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (question([[1]] * 600_000), "600000 sequences of 600000 tokens; at most 4096 sequences and 262144 tokens"),
        (question([[1]] * (MOST_SEQUENCES + 1)), f"at most {MOST_SEQUENCES} sequences"),
        (question([[1] * 200] * 1400), "1400 sequences of 280000 tokens; at most"),
        (question([[1, 2]] * (MOST_DRAWN + 1), max_tokens=1, logprobs=0), f"at most {MOST_DRAWN} are drawn at a time"),
        (b"[" + b"[1]," * 2**20 + b"[1]]", f"a Content-Length of at most {16 * MOST_TOKENS}"),
    ],
)
def test_more_than_one_client_may_ask_for_is_refused_with_the_limits(server: TeacherServer, body: bytes, words: str) -> None:
    before = server.model.batches
    status, content = request(server, body)
    assert status == 413
    assert words in json.loads(content)["error"]["message"]
    assert server.model.batches == before


def test_a_body_that_could_never_be_taken_is_not_read(server: TeacherServer) -> None:
    for length in (b"9" * 5000, b"%d" % 2**40, b"-1", b"x", "٣".encode()):
        with socket.create_connection(server.server_address[:2], timeout=PATIENCE) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: " + length + b"\r\n\r\n")
            content = connection.recv(2**12)
        assert b" 413 " in content


def test_the_same_in_our_own_dialect(server: TeacherServer) -> None:
    count = MOST_SEQUENCES + 1
    tensors = {
        "ids": torch.ones(2 * count, dtype=torch.int32),
        "lengths": torch.full((count,), 2, dtype=torch.int32),
        "starts": torch.ones(count, dtype=torch.int32),
    }
    status, content = request(server, wire.pack(tensors, {"model": "m"}), wire.SCORES)
    assert status == 413
    assert f"{count} sequences of {2 * count} tokens" in json.loads(content)["error"]["message"]


def test_as_many_as_a_client_sends_are_answered(server: TeacherServer) -> None:
    status, content = request(server, question([[1, 2]] * MOST_SEQUENCES))
    assert status == 200
    assert len(json.loads(content)["choices"]) == MOST_SEQUENCES


def test_requests_that_nobody_waits_for_are_dropped(server: TeacherServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty clients ask and leave while the model works for another one; the next one waits for none of them."""
    model, looks = server.model, server.model._look
    working, go_on = threading.Event(), threading.Event()
    seen: list[int] = []

    def slow(jobs: Any) -> Any:
        seen.append(sum(len(job.sequences) for job in jobs))
        working.set()
        go_on.wait(PATIENCE)
        return looks(jobs)

    monkeypatch.setattr(model, "_look", slow)
    address, body = urlsplit(server.url), question([[1, 2, 3]])
    answers: list[tuple[int, bytes]] = []
    first = threading.Thread(target=lambda: answers.append(request(server, body)))
    first.start()
    working.wait(PATIENCE)
    dropped = model.dropped
    for _ in range(20):
        with socket.create_connection((address.hostname, address.port)) as leaving:
            leaving.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    while model._jobs.qsize() < 20:
        time.sleep(0.01)
    honest = threading.Thread(target=lambda: answers.append(request(server, body)))
    honest.start()
    while model._jobs.qsize() < 21:
        time.sleep(0.01)
    go_on.set()
    first.join()
    honest.join()
    assert [status for status, _ in answers] == [200, 200]
    assert seen == [1, 1]  # the first, and the honest one
    assert model.dropped - dropped == 20
