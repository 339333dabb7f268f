"""A teacher server that misbehaves on command: real sockets, and an answer for every way in which a server can be wrong.

Each request to score takes the next mood of the script; when the script is at its end, all answers are honest. The honest
log-probs are a formula of the ids, so that a test can tell whose they are.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LONG = 60.0
"""Longer than any test waits."""


def truth(ids: Sequence[int]) -> list[float]:
    """Honest log-probs of the second id and all after it: each depends on the id, its place and the id before."""
    return [-(0.01 * ids[i] + 0.001 * i + 1.0 * ids[i - 1] + 0.5) for i in range(1, len(ids))]


def honest(prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """As vLLM answers."""
    choices = []
    for index, ids in enumerate(prompts):
        entries = [{str(i): {"logprob": v, "rank": 1, "decoded_token": "x"}} for i, v in zip(ids[1:], truth(ids), strict=True)]
        drawn = {"token_ids": [3], "logprobs": {"token_logprobs": [truth([*ids, 3])[-1]]}}
        choices.append({"index": index, "prompt_token_ids": list(ids), "prompt_logprobs": [None, *entries], **drawn})
    return {"choices": choices}


class HostileTeacher:
    def __init__(self, script: Sequence[str], card: dict[str, Any] | None) -> None:
        self.script = list(script)
        self.card = {"id": "hostile", "max_model_len": 1000} if card is None else card
        self.requests: list[list[list[int]]] = []
        self.keys: list[str | None] = []
        self.busy = self.most_busy = 0
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.url = ""

    def next_mood(self, prompts: list[list[int]]) -> str:
        with self.lock:
            self.requests.append(prompts)
            self.busy += 1
            self.most_busy = max(self.most_busy, self.busy)
            always = len(self.script) == 1 and self.script[0].startswith("always ")
            if always:
                return self.script[0].removeprefix("always ")
            return self.script.pop(0) if self.script else "honest"


@contextmanager
def hostile_teacher(
    script: Sequence[str] = (), *, card: dict[str, Any] | None = None, port: int = 0
) -> Iterator[HostileTeacher]:
    """A running server with this script."""
    teacher = HostileTeacher(script, card)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send(200, json.dumps({"data": [teacher.card] if teacher.card else []}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            teacher.keys.append(self.headers.get("Authorization"))
            mood = teacher.next_mood(body["prompt"])
            try:
                self.misbehave(mood, body["prompt"])
            except OSError:
                self.close_connection = True
            finally:
                with teacher.lock:
                    teacher.busy -= 1

        def misbehave(self, mood: str, prompts: list[list[int]]) -> None:
            answer = honest(prompts)
            choice = answer["choices"][0]
            entries = choice["prompt_logprobs"]
            if mood.isdigit():
                return self.send(int(mood), json.dumps({"error": f"no; you said {self.headers.get('Authorization')}"}).encode())
            if mood == "drop":
                self.close_connection = True
                return None
            if mood == "cut":  # the connection ends before the answer does
                data = json.dumps(answer).encode()
                self.send(200, data[: len(data) // 2], length=len(data))
                self.close_connection = True
                return None
            if mood == "half":  # a whole HTTP answer with half a JSON text
                data = json.dumps(answer).encode()
                return self.send(200, data[: len(data) // 2])
            if mood == "silent":
                teacher.closing.wait(LONG)
                return None
            if mood == "drip":  # a byte now and then, so that no read ever times out
                self.send_response(200)
                self.send_header("Content-Length", "100000")
                self.end_headers()
                while not teacher.closing.wait(0.05):
                    self.wfile.write(b" ")
                return None
            if mood == "huge":
                self.send_response(200)
                self.send_header("Content-Length", str(2**40))
                self.end_headers()
                while not teacher.closing.is_set():
                    self.wfile.write(b" " * 2**20)
                return None
            if mood == "slow":
                time.sleep(0.2)
            elif mood == "reordered":
                answer["choices"].reverse()
            elif mood == "missing choice":
                answer["choices"].pop()
            elif mood == "same index twice":
                for other in answer["choices"]:
                    other["index"] = 0
            elif mood == "NaN":
                entries[-1] = {str(prompts[0][-1]): {"logprob": float("nan")}}
            elif mood == "null":
                entries[-1] = {str(prompts[0][-1]): {"logprob": None}}
            elif mood == "positive":
                entries[-1] = {str(prompts[0][-1]): {"logprob": 0.7}}
            elif mood == "impossible":
                entries[-1] = {str(prompts[0][-1]): {"logprob": -9999.0}}
            elif mood == "missing token":
                entries.pop()
            elif mood == "one missing inside":
                entries[-2] = None
            elif mood == "off by one":
                choice["prompt_logprobs"] = [*entries[1:], None]
            elif mood == "shifted values":  # looks right, but each value is its neighbour's
                values = [0.0, *truth(prompts[0])]
                shifted = [{str(i): {"logprob": v}} for i, v in zip(prompts[0][1:], values, strict=False)]
                choice["prompt_logprobs"] = [None, *shifted]
            elif mood == "wrong ids":
                choice["prompt_token_ids"] = [*prompts[0][:-1], prompts[0][-1] + 1]
            elif mood == "no echo":
                del choice["prompt_token_ids"]
            elif mood == "a list":
                return self.send(200, b"[]")
            elif mood == "deep":
                return self.send(200, b"[" * 200_000)
            elif mood != "honest":
                raise AssertionError(mood)
            return self.send(200, json.dumps(answer).encode())

        def send(self, status: int, data: bytes, length: int | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data) if length is None else length))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    with Server(("127.0.0.1", port), Handler) as server:
        teacher.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield teacher
        finally:
            teacher.closing.set()
            server.shutdown()
            thread.join()
