"""A rollout server as the engine `server` knows it: vLLM's endpoints in front of a local sampler, on a real socket."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.types import Prompt


class RolloutServer:
    """Answers as vLLM does with `--logprobs-mode processed_logprobs` and in development mode."""

    def __init__(self, model: Any, max_model_len: int = 256) -> None:
        self.model, self.max_model_len = model, max_model_len
        self.asked: list[str] = []
        """Paths, in order."""
        self.token_seconds = 0.0
        """Between two tokens of an answer that is streamed."""
        self.breaks: list[int] = []
        """The next streams break off after so many tokens."""
        self.streams: list[dict[str, Any]] = []
        """Requests to stream, in order."""
        self.under_way = self.most_under_way = 0
        """Streams that still write. Of one that the client closed it hears with the next token."""
        self.aborted: list[int] = []
        """Tokens sent by streams that the client closed."""
        self._one_at_a_time = threading.Lock()

    def answer(self, path: str, body: Any) -> Any:
        with self._one_at_a_time:
            self.asked.append(path)
            if path == "/v1/models":
                return {"data": [{"id": "student", "max_model_len": self.max_model_len}]}
            if path == "/collective_rpc":
                folder = Path(body["kwargs"]["weights_path"])
                weights = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
                self.model.load_state_dict(weights, strict=False)  # tied weights come once
                return {}
            return {"choices": [self._complete(body)]} if path == "/v1/completions" else {}

    def events(self, body: dict[str, Any]) -> Iterator[bytes]:
        """An answer, token by token; a broken stream just ends."""
        with self._one_at_a_time:
            self.streams.append(body)
            whole = self._complete(body)
            end = self.breaks.pop(0) if self.breaks else None
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        sent, writes = 0, True
        try:
            pairs = zip(whole["token_ids"], whole["logprobs"]["token_logprobs"], strict=True)
            for sent, (token, value) in enumerate(pairs):
                if sent == end:
                    return
                last = sent == len(whole["token_ids"]) - 1
                first = {"prompt_token_ids": whole["prompt_token_ids"]} if sent == 0 else {}
                choice = {"token_ids": [token], "logprobs": {"token_logprobs": [value]}, **first}
                choice["finish_reason"] = whole["finish_reason"] if last else None
                if last:
                    writes = self._has_written()
                yield b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
                time.sleep(self.token_seconds)
            yield b"data: [DONE]\n\n"
        except GeneratorExit:
            self.aborted.append(sent)
            raise
        finally:
            if writes:
                self._has_written()

    def _has_written(self) -> bool:
        with self._one_at_a_time:
            self.under_way -= 1
        return False

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        banned = {int(token) for token in body["logit_bias"] or {}}
        if body["logprobs"]:  # the question how log-probs are meant
            with torch.no_grad():
                logits = self.model(torch.tensor([body["prompt"]])).logits[0, -1]
            logits[list(banned)] -= 100
            value, token = logits.log_softmax(-1).max(-1)
            logprobs = {"token_logprobs": [float(value)], "top_logprobs": [{str(int(token)): float(value)}]}
            return {"token_ids": [int(token)], "logprobs": logprobs, "finish_reason": "length"}
        settings = SamplingSettings(body["max_tokens"], body["temperature"], stop_ids=body["stop_token_ids"])
        sampler = LocalSampler(self.model, settings, vocab_size=min(banned, default=None))
        (rollout,) = sampler.sample([Prompt("asked", tuple(body["prompt"]))], seed=body["seed"], step=0)
        return {
            "token_ids": rollout.response_ids.tolist(),
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": rollout.rollout_logprobs.tolist()},
            "finish_reason": "stop" if rollout.stop_reason == "eos" else "length",
        }


def listening(server: RolloutServer, port: int = 0) -> ThreadingHTTPServer:
    """On a port of this machine; `serve_forever` answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(server.answer(self.path, None))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if isinstance(body, dict) and body.get("stream"):
                self._stream(server.events(body))
            else:
                with suppress(ConnectionAbortedError):  # a server that dies in the midst of it
                    self._reply(server.answer(self.path, body))

        def _stream(self, events: Iterator[bytes]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            try:
                for event in events:
                    self.wfile.write(event)
            except OSError:  # the client has left
                events.close()  # type: ignore[attr-defined]

        def _reply(self, answer: Any) -> None:
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


@contextmanager
def serving(server: RolloutServer) -> Iterator[str]:
    """Its URL, while it answers."""
    there = listening(server)
    thread = threading.Thread(target=there.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{there.server_port}"
    finally:
        there.shutdown()
        there.server_close()
        thread.join()
