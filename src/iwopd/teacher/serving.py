"""A small teacher server for machines without vLLM. It implements the part of OpenAI's completions API that scoring needs,
with vLLM's `prompt_logprobs` and `return_token_ids`, so one client works with both.

    GET  /health           200 when it is up
    GET  /v1/models        its one model, with vocab_size and max_model_len
    POST /v1/completions   log-probs of token ids at temperature 1; it generates one token at most
    POST /v1/iwopd/scores  log-probs, entropies, likeliest ids, log-probs of chosen ids, hidden states (`wire`)
    POST /v1/iwopd/matrix  rows of the output matrix, which makes distributions of hidden states

Without a token it listens on this machine only.
"""

from __future__ import annotations

import hmac
import json
import math
import select
import socket
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from iwopd.errors import UserError
from iwopd.http_clients import LOOPBACK
from iwopd.teacher import wire
from iwopd.teacher.json_answers import IMPOSSIBLE
from iwopd.teacher.questions import TokenSequence
from iwopd.teacher.refusals import MOST_TOKENS, RefusalError, check_amount, check_ids, check_model
from iwopd.teacher.serving_model import Scored, ServingModel
from iwopd.teacher.serving_scores import answer_matrix, answer_scores

MOST_BYTES = 2**26
"""Largest request."""
BYTES_PER_ID = 16
"""Of a request in JSON, at most: numbers are what it consists of."""
IDLE_SECONDS = 120
"""A connection without data for this long is closed."""


class ServingError(UserError, RuntimeError):
    """A server that cannot be started as asked."""


class TeacherServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    model: ServingModel
    """Set before `serve_forever`: the address is bound first, because a model takes long to load."""

    def __init__(self, name: str, *, host: str, port: int, token: str | None) -> None:
        if token is None and host not in LOOPBACK:
            raise ServingError(
                f"listening on {host} would let anybody who reaches this machine use the model: put a secret into the "
                "environment variable that --token-env names, or listen on 127.0.0.1"
            )
        self.name, self.token = name, token
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ServingError(f"cannot listen on {host}:{port}: {error}") from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has left is no news."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    server: TeacherServer

    def do_GET(self) -> None:
        self._answer({"/health": dict, "/v1/models": self._models})

    def do_POST(self) -> None:
        self._answer({"/v1/completions": self._completions, wire.SCORES: self._scores, wire.MATRIX: self._matrix})

    def _answer(self, routes: Mapping[str, Any]) -> None:
        try:
            if self.path not in routes:
                self.close_connection = True  # its body was not read
                raise RefusalError(404, f"there is no {self.command} {self.path} here")
            if self.path != "/health":
                self._check_token()
            self._send(200, routes[self.path]())
        except RefusalError as refusal:
            self._send(refusal.status, {"error": {"message": str(refusal), "code": refusal.status}})
        except (BrokenPipeError, ConnectionResetError, ConnectionAbortedError, TimeoutError):
            self.close_connection = True  # the client has left
        except Exception as error:
            self._send(500, {"error": {"message": f"{type(error).__name__}: {error}", "code": 500}})

    def _check_token(self) -> None:
        given = self.headers.get("Authorization", "").encode()
        wanted = self.server.token
        if wanted is not None and not hmac.compare_digest(given, f"Bearer {wanted}".encode()):
            self.close_connection = True  # its body was not read
            raise RefusalError(401, "this server wants a token: Authorization: Bearer ...")

    def _models(self) -> dict[str, Any]:
        model = self.server.model
        card = {"id": self.server.name, "object": "model", "owned_by": "iwopd"}
        return {"object": "list", "data": [{**card, "max_model_len": model.max_length, "vocab_size": model.vocab_size}]}

    def _completions(self) -> dict[str, Any]:
        sequences, draw = read_request(self._json(), self.server.name, self.server.model)
        scored = self.server.model.score(sequences, draw=draw, abandoned=self._abandoned)
        return completion(self.server.name, sequences, scored)

    def _scores(self) -> bytes:
        return answer_scores(self._body(MOST_BYTES), self.server.name, self.server.model, self._abandoned)

    def _matrix(self) -> bytes:
        return answer_matrix(self._json(), self.server.name, self.server.model)

    def _abandoned(self) -> bool:
        """Whether the client has closed its connection, and waits for nothing any more."""
        waiting = select.poll()
        waiting.register(self.connection, select.POLLIN)
        try:  # not `recv` alone: it would wait for the connection's timeout
            return bool(waiting.poll(0)) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    def _body(self, most: int) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 20) or int(length) > most:
            self.close_connection = True
            left = int(length) if length.isdecimal() and len(length) < 9 and int(length) <= MOST_BYTES else 0
            while left > 0 and (piece := self.rfile.read(min(left, 2**16))):  # else the client does not hear why
                left -= len(piece)
            raise RefusalError(413, f"a request needs a Content-Length of at most {most}")
        return self.rfile.read(int(length))

    def _json(self) -> Any:
        ids = max(MOST_TOKENS, min(self.server.model.max_length, MOST_BYTES // BYTES_PER_ID))
        try:
            return json.loads(self._body(ids * BYTES_PER_ID))
        except (ValueError, RecursionError) as error:
            raise RefusalError(400, f"the request is not JSON: {error}") from None

    def _send(self, status: int, content: Any) -> None:
        binary = isinstance(content, bytes)
        data = content if binary else json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/octet-stream" if binary else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Do not log requests."""


def read_request(request: Any, name: str, model: ServingModel) -> tuple[list[TokenSequence], bool]:
    """Sequences to score, and whether to sample one more token with its log-prob."""
    if not isinstance(request, dict):
        raise RefusalError(400, "a request is a JSON object")
    check_model(request.get("model"), name)
    for key, allowed in (("max_tokens", (0, 1)), ("temperature", (1, None)), ("prompt_logprobs", (0, None)), ("n", (1, None))):
        if request.get(key) not in allowed:
            more = ", and gives likeliest ids to teacher.dialect = 'iwopd' only" if key == "prompt_logprobs" else ""
            raise RefusalError(400, f"{key} is {request.get(key)!r}; this server only scores, and takes {allowed[0]}{more}")
    prompt = request.get("prompt")
    sequences = [prompt] if isinstance(prompt, list) and prompt and not isinstance(prompt[0], list) else prompt
    if not isinstance(sequences, list) or not sequences:
        raise RefusalError(400, "prompt must be a list of token ids, or a list of such lists; texts are not taken")
    draw = request.get("max_tokens") == 1 and request.get("logprobs") is not None
    check_amount(len(sequences), sum(len(ids) for ids in sequences if isinstance(ids, list)), draw=draw)
    for ids in sequences:
        if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
            raise RefusalError(400, "prompt must be a list of token ids, or a list of such lists, none of them empty")
        check_ids(ids, model)
    return [TokenSequence(tuple(ids), 1) for ids in sequences], draw


def completion(name: str, sequences: list[TokenSequence], scored: Scored) -> dict[str, Any]:
    """The response, in vLLM's format."""
    choices = []
    for index, (sequence, scores) in enumerate(zip(sequences, scored.scores, strict=True)):
        ids, logprobs = sequence.ids, scores.logprobs.tolist()
        if any(math.isnan(value) for value in logprobs):
            raise RefusalError(422, "the model's log-probs are not numbers: its weights may hold NaN")
        entries = [{str(i): {"logprob": max(value, IMPOSSIBLE)}} for i, value in zip(ids[1:], logprobs, strict=True)]
        choice = {"index": index, "text": "", "finish_reason": "length", "logprobs": None, "token_ids": []}
        choice.update({"prompt_token_ids": list(ids), "prompt_logprobs": [None, *entries]})
        if scored.drawn:
            drawn = scored.drawn[index]
            choice.update({"token_ids": [drawn.id], "logprobs": {"token_logprobs": [max(drawn.logprob, IMPOSSIBLE)]}})
        choices.append(choice)
    count = sum(len(sequence.ids) for sequence in sequences)
    usage = {"prompt_tokens": count, "completion_tokens": len(scored.drawn), "total_tokens": count + len(scored.drawn)}
    return {"object": "text_completion", "model": name, "choices": choices, "usage": usage}
