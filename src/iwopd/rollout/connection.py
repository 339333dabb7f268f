"""Plain JSON over HTTP to a rollout server: bounded in time, tried again while the server is away, the key never shown."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import httpx

from iwopd.http_clients import CONNECT_SECONDS, GarbledError, client_settings, encode, hide_key, key_headers, parse
from iwopd.rollout.engine import EngineError

LONGEST_WAIT = 10.0
_jitter = random.Random()  # not the global one: its state belongs to training, and to checkpoints


class ServerError(EngineError):
    """A rollout server that is away for too long, refuses, or answers something else than what it was asked."""

    exit_code = 1


@dataclass(frozen=True)
class Connection:
    """Where the server is and how long it may take. Threads may share it."""

    url: str
    api_key_env: str | None = None
    request_timeout: float = 1800.0
    patience: float = 120.0
    was_away: Callable[[], None] = lambda: None
    """Called after every attempt that failed."""

    def get(self, path: str) -> Any:
        return self._ask("GET", path, None)

    def post(self, path: str, body: Any, *, first: Callable[[], None] = lambda: None) -> Any:
        """`first` is called before every attempt."""
        return self._ask("POST", path, body, first)

    def _ask(self, method: str, path: str, body: Any, first: Callable[[], None] = lambda: None) -> Any:
        """The parsed answer (None if it is empty). Transport errors and 5xx are retried until patience ends."""
        give_up = time.monotonic() + self.patience
        wait = 0.5
        while True:
            first()
            headers = key_headers(self.api_key_env, error=ServerError)
            try:
                answer = self._client.request(method, self.url.rstrip("/") + path, content=encode(body), headers=headers)
            except httpx.TransportError as error:
                reason = hide_key(str(error) or type(error).__name__, self.api_key_env)
            else:
                if answer.is_success:
                    return self._read(path, answer.content)
                reason = f"{answer.status_code} {hide_key(answer.text, self.api_key_env)}"
                if answer.status_code < 500:
                    raise ServerError(f"the rollout server {self.url}{path} refuses: {reason}")
            self.was_away()
            pause = wait * _jitter.uniform(0.5, 1.0)
            if time.monotonic() + pause > give_up:
                raise ServerError(
                    f"the rollout server {self.url}{path} was away for {self.patience:g} s (engine.server.patience): {reason}"
                )
            time.sleep(pause)
            wait = min(2 * wait, LONGEST_WAIT)

    @cached_property
    def _client(self) -> httpx.Client:
        timeout = httpx.Timeout(self.request_timeout, connect=CONNECT_SECONDS)
        return httpx.Client(**client_settings([self.url]), timeout=timeout)

    def _read(self, path: str, content: bytes) -> Any:
        try:
            return parse(content) if content else None
        except GarbledError as error:
            raise ServerError(f"the rollout server {self.url}{path} answers no JSON: {error}") from None
