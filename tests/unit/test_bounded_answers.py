"""Servers that send too much, too slowly, numbers that no float holds, or the key itself. Real servers on this machine."""

from __future__ import annotations

import base64
import gzip
import json
import os
import random
import socket
import threading
import tracemalloc
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from iwopd.config import ConfigError, make_config
from iwopd.config.engines import TeacherSource
from iwopd.data import sources
from iwopd.data.sources import Release, SourceError
from iwopd.http_clients import HIDDEN, GarbledError, hide_key, parse, without_key
from iwopd.rollout.connection import MOST_BYTES, Connection, ServerError
from iwopd.rollout.requests import Vocabulary, check_tokens
from iwopd.rollout.restarts import Restarts
from iwopd.rollout.sampling import SamplingError
from iwopd.rollout.server_stream import ServerStream
from iwopd.rollout.streaming import Answer, Inbox
from iwopd.teacher import json_answers
from iwopd.teacher.errors import TeacherError
from iwopd.teacher.server import ServerScorer

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
REQUEST = {"prompt": [1], "max_tokens": 4, "stop_token_ids": [1], "seed": 0}


@contextmanager
def saying(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that says this to everybody."""
    listening = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.recv(2**16)
                    talk(connection)
                except OSError:
                    pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        over.set()
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


def whole(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> Callable[[socket.socket], None]:
    lines = [b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body), b"Connection: close", *headers]
    return lambda connection: connection.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)


def streamed(url: str, key: str | None = None) -> Any:
    """What the streaming client puts into its inbox first."""
    inbox = Inbox()
    stream = ServerStream(Connection(url, key, request_timeout=30.0, patience=0.1), {}, 1, inbox, Restarts(lambda: None))
    try:
        stream.start(0, dict(REQUEST))
        return inbox.get()
    finally:
        stream.close()


def test_an_answer_is_never_unpacked() -> None:
    """A megabyte that would become a thousand."""
    packed = gzip.compress(bytes(2**26), 9)
    tracemalloc.start()
    with saying(whole(packed, b"Content-Encoding: gzip")) as url:
        with pytest.raises(ServerError, match=r"packed \(gzip\), although it was asked for plainly"):
            Connection(url).post("/v1/x", {})
        assert "packed (gzip)" in str(streamed(url))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


def endless(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"\r\n")
    while True:
        connection.sendall(b" " * 2**16)


def dripping(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"Content-Length: 1000\r\n\r\n")
    for _ in range(1000):
        connection.sendall(b" ")
        threading.Event().wait(0.05)


def test_an_answer_without_an_end_is_cut() -> None:
    with saying(endless) as url:
        with pytest.raises(ServerError, match=f"more than {MOST_BYTES} bytes"):
            Connection(url).post("/v1/x", {})
        assert "far more than the question needs" in str(streamed(url))


def test_an_answer_that_drips_does_not_outlive_the_timeout() -> None:
    with saying(dripping) as url, pytest.raises(ServerError, match=r"no whole answer within 0.3 s"):
        Connection(url, request_timeout=0.3, patience=0.1).post("/v1/x", {})


# --- files that are loaded --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (gzip.compress(bytes(2**20)), "has more than 0 MiB"),
        (gzip.compress(random.Random(0).randbytes(4096))[:-9] + b"\0" * 9, "CRC check failed"),
        (gzip.compress(b"a" * 999)[:15] + b"\xff" * 30, "invalid"),
        (gzip.compress(b"a" * 999)[:-12], "ended before the end"),
        (b"<html>", "Not a gzipped file"),
    ],
    ids=["too large", "damaged", "no deflate", "cut off", "something else"],
)
def test_a_release_that_cannot_be_unpacked_ends_in_words(
    body: bytes, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sources, "MOST_BYTES", 2**19)
    with saying(whole(body)) as url, pytest.raises(SourceError, match=words):
        Release(f"{url}/Set.jsonl.gz").fetch()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("talk", [b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}", b"nonsense\r\n\r\n", b""])
def test_a_release_that_breaks_off_ends_in_words(talk: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with saying(lambda connection: connection.sendall(talk)) as url, pytest.raises(SourceError, match="cannot get"):
        Release(f"{url}/Set.jsonl").fetch()


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-(10**400), 10**400, "-1", None, [1], True, float("-inf"), {"a": 1}])
def test_logprobs_that_no_float_holds_end_in_words(value: Any) -> None:
    with pytest.raises(SamplingError, match="log-probs that are not finite"):
        check_tokens("the answer", Answer([1], [value], "length"), Vocabulary(4, 4))
    if value != float("-inf"):  # which a teacher may say
        with pytest.raises(TeacherError, match="the log-prob at position 3 is"):
            json_answers.logprob(value, 3)


@pytest.mark.parametrize("value", [10**400, -1, "1", None, 1.0, True, [1]])
def test_ids_that_are_none_end_in_words(value: Any) -> None:
    with pytest.raises(SamplingError, match="has id"):
        check_tokens("the answer", Answer([value], [-1.0], "length"), Vocabulary(4, 4))
    with pytest.raises(TeacherError, match="where a token id should be"):
        json_answers.token_id(value)


# --- keys -------------------------------------------------------------------------------------------------------------

KEY = 'sk-Ab"c/d\\e+1234567'
SPELLINGS = [
    KEY,
    json.dumps(KEY),
    json.dumps(json.dumps(KEY)),
    KEY.replace("/", "\\/").replace('"', '\\"'),
    "".join(f"\\u{ord(letter):04x}" for letter in KEY),
    "".join(f"\\u{ord(letter):04X}" for letter in KEY),
    "".join(f"%{ord(letter):02X}" for letter in KEY),
    "".join(f"&#{ord(letter)};" for letter in KEY),
    "".join(f"\\x{ord(letter):02x}" for letter in KEY),
    KEY.replace("+", "\\x2B").replace("/", "\\u{2f}"),
    KEY.replace("+", "\\U0000002b").replace("/", "\\057"),
    "".join(f"%2525{ord(letter):02x}" for letter in KEY),
    KEY.replace("+", "&plus;").replace("/", "&amp;sol;").replace("-", "&#x2D;").replace('"', "&quot;"),
    KEY.replace("/", "=2F").replace("+", "=2B"),
    KEY.upper(),
    "\0".join(KEY),
    " ".join(KEY),
    f"{KEY[:9]}\n{KEY[9:]}",
    f"{KEY[:9]}\u200b{KEY[9:]}",
    "".join(chr(ord(letter) + 0xFEE0) for letter in KEY),
    KEY.encode().hex(),
    KEY.encode().hex().upper(),
    *(base64.b64encode(before + KEY.encode() + b"!").decode() for before in (b"", b"Bearer ", b"ab", b"u:")),
    base64.urlsafe_b64encode(KEY.encode()).decode().rstrip("="),
    f"{KEY[:-5]}...",
]
"""As JSON, JavaScript, Python, URLs, HTML, mail, a terminal, logs or Basic authentication write it, and cut off."""


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", KEY)


def assert_hidden(text: str) -> None:
    packed = [base64.b64encode(before + KEY.encode())[4:-4].decode() for before in (b"", b"a", b"ab")]
    for shown in (KEY, KEY.encode().hex(), *packed):
        for start in range(len(shown) - 7):  # not even eight letters of it, in whatever script and however far apart
            assert shown[start : start + 8].lower() not in _bare(text)
    tail = KEY[-7:]
    for spelling in (
        tail,
        "".join(f"\\u{ord(letter):04x}" for letter in tail),
        "".join(f"%{ord(letter):02X}" for letter in tail),
    ):
        assert spelling.lower() not in text.lower()


def _bare(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).lower().replace("\u200b", "").split())


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_key_is_hidden_however_it_is_spelled(spelling: str) -> None:
    assert HIDDEN in hide_key(f"no entry for {spelling}!", "SOME_KEY")
    assert_hidden(hide_key(f"no entry for {spelling}!", "SOME_KEY"))
    spelling = spelling.replace("\\", "") if "\0" in spelling else spelling  # the key's own and that of \\u0000 would be one
    key = KEY.replace("\\", "") if "\0" in spelling else KEY
    body = without_key(json.dumps({"error": spelling}).encode(), {"Authorization": f"Bearer {key}"})
    assert HIDDEN in json.loads(body)["error"]
    assert_hidden(json.loads(body)["error"])


@pytest.mark.parametrize("spelling", SPELLINGS[:6])
def test_no_error_of_any_client_shows_the_key(spelling: str) -> None:
    inner = spelling if spelling.startswith(('"', "\\")) else json.dumps(spelling)
    said = inner if inner.startswith('"') else f'"{inner}"'
    bodies = [
        (b"403 Forbidden", f'{{"error": {said}}}'),
        (b"500 Oh", f'{{"error": {said}}}'),
        (b"200 OK", f'{{"data": [{{"id": {said}}}], "choices": [{said}], "error": {said}}}'),
        (b"200 OK", said),
    ]
    for status, body in bodies:
        with saying(whole(f"{body}".encode(), status=status)) as url:
            scorer = ServerScorer(TeacherSource(urls=[url], api_key_env="SOME_KEY", patience=0.1, request_timeout=5.0))
            for ask in (
                partial(scorer.ask, "/v1/models"),
                partial(scorer.try_out, [], vocab_size=4, max_tokens=4),
                partial(Connection(url, "SOME_KEY", patience=0.1).post, "/v1/x", {}),
            ):
                try:
                    assert_hidden(repr(ask()))
                except (TeacherError, ServerError) as error:
                    assert_hidden(str(error))
        with saying(whole(f"data: {body}\n\n".encode(), status=status)) as url:
            assert_hidden(str(streamed(url, "SOME_KEY")))


@pytest.mark.parametrize(
    "talk",
    [
        HEAD + f"Content-Encoding: {KEY}\r\nContent-Length: 2\r\n\r\n{{}}".encode(),
        f"HTTP/1.1 200 OK\r\n{KEY}\r\nContent-Length: 2\r\n\r\n{{}}".encode(),
        f"{KEY}\r\n\r\n".encode(),
        HEAD + f"Content-Length: {KEY}\r\n\r\n".encode(),
        HEAD + f"Transfer-Encoding: chunked\r\n\r\n{KEY}\r\n".encode(),
    ],
    ids=["encoding", "header", "status", "length", "chunk"],
)
def test_a_key_in_what_is_no_body_is_not_shown_either(talk: bytes) -> None:
    said: list[str] = []
    with saying(lambda connection: connection.sendall(talk)) as url:
        settings = TeacherSource(urls=[url], api_key_env="SOME_KEY", patience=1.0, request_timeout=5.0)
        scorer = ServerScorer(settings, notify=said.append)
        for ask in (partial(scorer.ask, "/v1/models"), partial(Connection(url, "SOME_KEY", patience=0.1).post, "/v1/x", {})):
            with pytest.raises((TeacherError, ServerError)) as refused:
                ask()
            assert_hidden(str(refused.value))
        assert_hidden(str(streamed(url, "SOME_KEY")))
    assert_hidden(" ".join(said))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1"])
def test_json_in_another_encoding_is_not_read(encoding: str) -> None:
    """It would carry words past whoever looks for a key, and no server of this kind sends it."""
    with pytest.raises(GarbledError, match="not JSON"):
        parse(json.dumps({"a": "é"}, ensure_ascii=False).encode(encoding))
    assert parse(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


def test_hiding_a_key_takes_no_longer_than_reading() -> None:
    cut = "".join(f"{letter} " for letter in KEY[:8])
    for hostile in ("\\" * 2**17, KEY[:-1] * 2**13, "%73" * 2**15, "%25" * 2**15, "s " * 2**16, cut * 2**13, "&amp;" * 2**15):
        hide_key(hostile, "SOME_KEY")  # would take hours if it were quadratic
        without_key(hostile.encode(), {"Authorization": f"Bearer {KEY}"})


@pytest.mark.parametrize(
    "key",
    ["hf_abcdefghijklmnop", "sk-proj-abcdef123456", "sk_live_51abcdef", "ghp_Abcdef123456", "0123456789abcdef0123456789ABCDEF"],
)
def test_a_key_where_its_variable_should_be_is_refused_and_not_repeated(key: str) -> None:
    for section in ({"teacher": {"api_key_env": key}}, {"engine": {"server": {"api_key_env": key}}}):
        with pytest.raises(ConfigError, match="must be the name of an environment variable, not the key itself") as refused:
            make_config({"models": {"world": "clean"}, **section})
        assert key not in str(refused.value)
        assert key[4:] not in str(refused.value)


@pytest.mark.parametrize("name", ["HF_TOKEN", "OPENAI_API_KEY", "hf_token_teacher", "TEACHER_KEY_2", "key"])
def test_names_of_variables_are_taken(name: str) -> None:
    assert TeacherSource(api_key_env=name).api_key_env == name


@pytest.mark.parametrize(
    "url",
    [
        "http://host:8000?api_key=hunter2hunter2",
        "http://host:8000/v1?token=hunter2hunter2#x",
        "http://user:hunter2hunter2@host:8000",
        "http://host:8000/sk-hunter2hunter2/v1",
        "http://host:8000/v1#hunter2hunter2",
        "http://host:bad?key=hunter2hunter2",
        "ftp://host?key=hunter2hunter2",
    ],
)
def test_a_url_with_a_key_is_refused_and_not_repeated(url: str) -> None:
    for section in ({"teacher": {"urls": [url]}}, {"engine": {"server": {"url": url}}}):
        with pytest.raises(ConfigError) as refused:
            make_config({"models": {"world": "clean"}, **section})
        assert "hunter2" not in str(refused.value)


def test_the_server_takes_no_key_for_a_name_either() -> None:
    from iwopd.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["serve-teacher", str(Path(os.devnull)), "--token-env", "hf_abcdefghijklmnop"])
    assert ended.value.code == 2
