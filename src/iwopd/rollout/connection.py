"""Plain JSON over HTTP to a rollout server: bounded in size and time, tried again while it is away, the key never shown."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import httpx

from iwopd.http_clients import (
    BYTES_PER_TOKEN,
    CONNECT_SECONDS,
    GarbledError,
    OversizedError,
    UnreachableError,
    client_settings,
    exchange,
    hide_key,
    key_headers,
    parse,
)
from iwopd.rollout.engine import EngineError

LONGEST_WAIT = 10.0
MOST_BYTES = 2**22
"""Of an answer, beside what it says of tokens."""
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
        return self._ask("GET", path, None, MOST_BYTES)

    def post(self, path: str, body: Any, tokens: int = 0, *, first: Callable[[], None] = lambda: None) -> Any:
        """`tokens`: how many the answer is about, prompts included; `first` is called before every attempt."""
        return self._ask("POST", path, body, MOST_BYTES + BYTES_PER_TOKEN * tokens, first)

    def _ask(self, method: str, path: str, body: Any, most_bytes: int, first: Callable[[], None] = lambda: None) -> Any:
        """The parsed answer (None if it is empty). Transport errors and 5xx are retried until patience ends."""
        give_up = time.monotonic() + self.patience
        wait = 0.5
        while True:
            first()
            try:
                status, content = self._exchange(method, path, body, most_bytes)
            except UnreachableError as error:
                reason = hide_key(str(error), self.api_key_env)
            except (GarbledError, OversizedError) as error:
                raise ServerError(f"the rollout server {self.url}{path} cannot be understood: {error}") from None
            else:
                if 200 <= status < 300:
                    return self._read(path, content)
                reason = f"{status} {hide_key(content.decode(errors='replace'), self.api_key_env)}"
                if status < 500:
                    raise ServerError(f"the rollout server {self.url}{path} refuses: {reason}")
            self.was_away()
            pause = wait * _jitter.uniform(0.5, 1.0)
            if time.monotonic() + pause > give_up:
                raise ServerError(
                    f"the rollout server {self.url}{path} was away for {self.patience:g} s (engine.server.patience): {reason}"
                )
            time.sleep(pause)
            wait = min(2 * wait, LONGEST_WAIT)

    def _exchange(self, method: str, path: str, body: Any, most_bytes: int) -> tuple[int, bytes]:
        headers = key_headers(self.api_key_env, error=ServerError)
        loop, client = self._running
        work = exchange(
            client,
            method,
            self.url.rstrip("/") + path,
            headers=headers,
            body=body,
            seconds=self.request_timeout,
            most_bytes=most_bytes,
        )
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    @cached_property
    def _running(self) -> tuple[asyncio.AbstractEventLoop, httpx.AsyncClient]:
        """All connections belong to one thread with an event loop, which ends with the process."""
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        return loop, httpx.AsyncClient(**client_settings([self.url]), timeout=timeout)

    def _read(self, path: str, content: bytes) -> Any:
        try:
            return parse(content) if content else None
        except GarbledError as error:
            raise ServerError(f"the rollout server {self.url}{path} answers no JSON: {error}") from None
