"""Answers of a vLLM server, read while they are written (server-sent events). A closed connection aborts its request."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

import httpx

from iwopd.http_clients import (
    BYTES_PER_TOKEN,
    CONNECT_SECONDS,
    GarbledError,
    OversizedError,
    bounded,
    client_settings,
    encode,
    hide_key,
    key_headers,
    without_key,
)
from iwopd.rollout.connection import LONGEST_WAIT, MOST_BYTES, Connection, ServerError
from iwopd.rollout.requests import continued
from iwopd.rollout.restarts import Restarts
from iwopd.rollout.streaming import Answer, Inbox, Stream

EVENT = "data:"
END = "[DONE]"
BYTES_PER_EVENT = 2**12
"""Each token may have an event of its own, with what vLLM says about the request as a whole."""
_jitter = random.Random()  # not the global one: its state belongs to training, and to checkpoints


class BrokenError(Exception):
    """A server that is away, or an answer that breaks off: worth another try."""


class ServerStream(Stream):
    """All connections belong to one thread with an event loop."""

    def __init__(
        self, connection: Connection, fields: dict[str, Any], in_flight: int, inbox: Inbox, restarts: Restarts
    ) -> None:
        """`fields` are those of every request; `in_flight` requests are under way at once."""
        self._connection, self._fields, self._inbox, self._restarts = connection, fields, inbox, restarts
        self._loop = asyncio.new_event_loop()
        self._places = asyncio.Semaphore(in_flight)
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        self._client = httpx.AsyncClient(**client_settings([connection.url]), timeout=timeout)
        self._under_way: dict[int, Future[None]] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, number: int, request: dict[str, Any]) -> None:
        self._under_way[number] = asyncio.run_coroutine_threadsafe(self._answer(number, request), self._loop)

    def stop(self, number: int) -> None:
        self._under_way[number].cancel()

    def advance(self) -> bool:
        return False

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()

    async def _answer(self, number: int, request: dict[str, Any]) -> None:
        """One answer to its end. Where it breaks off it is continued, until patience ends."""
        try:
            async with self._places:
                written: list[int] = []
                failing_since, wait = None, 0.5
                while True:
                    before = len(written)
                    try:
                        await asyncio.to_thread(self._restarts.make_sure)
                        async with asyncio.timeout(self._connection.request_timeout):
                            await self._attempt(number, continued(request, written), written)
                        return
                    except (BrokenError, httpx.TransportError, TimeoutError) as error:
                        reason = hide_key(str(error) or type(error).__name__, self._connection.api_key_env)
                        self._restarts.was_away()
                    if len(written) == request["max_tokens"] or {*written[-1:]} & {*request["stop_token_ids"]}:
                        return  # it lacks nothing but its last words
                    if failing_since is None or len(written) > before:
                        failing_since, wait = time.monotonic(), 0.5
                    await self._pause(failing_since, wait, reason)
                    wait = min(2 * wait, LONGEST_WAIT)
        except Exception as error:
            self._inbox.put(error)

    async def _pause(self, failing_since: float, wait: float, reason: str) -> None:
        pause, about = wait * _jitter.uniform(0.5, 1.0), self._connection
        if time.monotonic() + pause > failing_since + about.patience:
            raise ServerError(
                f"the rollout server {about.url} was away for {about.patience:g} s (engine.server.patience): {reason}"
            )
        await asyncio.sleep(pause)

    async def _attempt(self, number: int, request: dict[str, Any], written: list[int]) -> None:
        """Pass the answer on as it comes; `written` collects its ids."""
        async for choice in self._choices(request):
            answer = self._part(choice, request["prompt"])
            written += answer.token_ids
            self._inbox.put((number, answer))
            if answer.finish_reason is not None:
                return
        raise BrokenError("an answer broke off")

    def _part(self, choice: Any, prompt: list[int]) -> Answer:
        try:
            ids, logprobs = choice["token_ids"], choice["logprobs"]
            values = logprobs["token_logprobs"] if ids else []
            whole = isinstance(ids, list) and isinstance(values, list)
        except (KeyError, TypeError):
            whole = False
        if not whole:
            raise ServerError(
                f"the rollout server {self._connection.url} streams no token ids or no log-probs; vLLM 0.32 gives both"
            )
        seen = choice.get("prompt_token_ids")
        if seen is not None and seen != prompt:
            raise ServerError(f"the rollout server read other ids than those of the prompt: {str(seen)[:80]} ...")
        return Answer(ids, values, choice.get("finish_reason"))

    async def _choices(self, request: dict[str, Any]) -> AsyncIterator[Any]:
        """The one choice of every event."""
        about = self._connection
        headers = key_headers(about.api_key_env, error=ServerError)
        body = encode({**self._fields, **request, "stream": True})
        url = about.url.rstrip("/") + "/v1/completions"
        async with self._client.stream("POST", url, content=body, headers=headers) as response:
            try:
                if not response.is_success:
                    content = b"".join([piece async for piece in bounded(response, MOST_BYTES)])
                    words = hide_key(content.decode(errors="replace"), about.api_key_env)
                    if response.status_code < 500:
                        raise ServerError(f"the rollout server {url} refuses: {response.status_code} {words}")
                    raise BrokenError(f"{response.status_code} {words}")
                most = MOST_BYTES + BYTES_PER_TOKEN * len(request["prompt"]) + BYTES_PER_EVENT * request["max_tokens"]
                async for line in _lines(bounded(response, most)):
                    if line.startswith(EVENT) and (text := line.removeprefix(EVENT).strip()) != END:
                        yield self._choice(without_key(text.encode(), headers).decode())
            except (GarbledError, OversizedError) as error:
                raise ServerError(f"the rollout server {url} cannot be understood: {error}") from None

    def _choice(self, text: str) -> Any:
        try:
            event = json.loads(text)
            if "error" in event:
                raise BrokenError(hide_key(str(event["error"]), self._connection.api_key_env))
            (choice,) = event["choices"]
        except (ValueError, RecursionError, KeyError, TypeError):
            what = hide_key(text, self._connection.api_key_env)
            raise ServerError(f"the rollout server {self._connection.url} streams what is no answer: {what}") from None
        return choice


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The lines of an answer, the last one without its end if it has none."""
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")
