"""Plain JSON over HTTP to a rollout server: bounded in time, tried again while the server is away, the key never shown."""

from __future__ import annotations

import http.client
import json
import os
import random
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from iwopd.errors import UserError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
LONGEST_WAIT = 10.0


class ServerError(UserError, RuntimeError):
    """A rollout server that is away for too long, refuses, or answers something else than what it was asked."""

    exit_code = 1


@dataclass(frozen=True)
class Connection:
    """Where the server is and how long it may take."""

    url: str
    api_key_env: str | None = None
    request_timeout: float = 1800.0
    patience: float = 120.0

    def get(self, path: str) -> Any:
        return self._ask(path, None)

    def post(self, path: str, body: Any) -> Any:
        return self._ask(path, json.dumps(body).encode())

    def _ask(self, path: str, content: bytes | None) -> Any:
        """The parsed answer (None if it is empty). Transport errors and 5xx are tried again until patience ends."""
        give_up = time.monotonic() + self.patience
        wait = 0.5
        while True:
            try:
                return self._once(path, content)
            except urllib.error.HTTPError as error:
                reason = f"{error.code} {self._hide(error.read(2000).decode(errors='replace'))}"
                if error.code < 500:
                    raise ServerError(f"the rollout server {self.url}{path} refuses: {reason}") from None
            except (OSError, http.client.HTTPException) as error:
                reason = self._hide(str(error) or type(error).__name__)
            pause = wait * random.uniform(0.5, 1.0)
            if time.monotonic() + pause > give_up:
                raise ServerError(
                    f"the rollout server {self.url}{path} was away for {self.patience:g} s (vllm.patience): {reason}"
                ) from None
            time.sleep(pause)
            wait = min(2 * wait, LONGEST_WAIT)

    def _once(self, path: str, content: bytes | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.api_key_env is not None:
            headers["Authorization"] = f"Bearer {self._key()}"
        request = urllib.request.Request(self.url.rstrip("/") + path, content, headers)
        here = urlsplit(self.url).hostname in LOOPBACK  # no proxy knows this machine's own servers
        opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if here else []))
        with opener.open(request, timeout=self.request_timeout) as response:
            answer = response.read()
        try:
            return json.loads(answer) if answer else None
        except ValueError as error:
            raise ServerError(f"the rollout server {self.url}{path} answers no JSON: {error}") from None

    def _key(self) -> str:
        key = os.environ.get(self.api_key_env or "", "").strip()
        if not key:
            raise ServerError(f"the environment variable {self.api_key_env}, which should hold the server's API key, is empty")
        return key

    def _hide(self, text: str) -> str:
        key = os.environ.get(self.api_key_env or "", "").strip()
        return " ".join((text.replace(key, "[key]") if key else text).split())[:300]
