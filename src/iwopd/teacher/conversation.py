"""Talking to the servers of one teacher over HTTP.

Requests are bounded in number, size and time. Transport errors and 5xx are retried, on another replica if there is one,
for `patience` seconds; a refusal (4xx) or a wrong response is an error at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx

from iwopd.background import in_background
from iwopd.config.engines import TeacherSource
from iwopd.http_clients import (
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
from iwopd.teacher.errors import TeacherError, TeacherGoneError
from iwopd.teacher.replicas import Replica

MOST_GARBLED = 3
"""A request fails when this many of its responses cannot be read."""
MOST_BYTES = 2**22
"""Of an answer to a check."""

Result = TypeVar("Result")
Notify = Callable[[str], None]


@dataclass
class Request(Generic[Result]):
    """A question to any of the servers."""

    path: str
    body: Callable[[], Any]
    """Bytes, or what becomes JSON; made when it is sent."""
    read: Callable[[bytes], Result]
    """What an answer says; a `TeacherError` if it is not believed, a `GarbledError` if it cannot be read."""
    most_bytes: int
    home: int | None = None
    """The replica that should answer, unless it does not answer at all; None: any."""
    failing_since: float | None = None
    garbled: int = 0


class Servers:
    """The servers of one teacher, which all answer alike."""

    def __init__(self, settings: TeacherSource, name: str, notify: Notify) -> None:
        self.settings, self.name, self.notify = settings, name, notify
        self.replicas = [Replica(url) for url in settings.urls]

    def answers(self, requests: Sequence[Request[Result]]) -> list[Result]:
        """What the servers say to all requests, in their order."""
        return run_async(self._converse(requests)) if requests else []

    async def _converse(self, requests: Sequence[Request[Result]]) -> list[Result]:
        """The workers of all replicas share one queue; a failed request goes back into it for the next free worker."""
        waiting = _Waiting([None if one.home is None else self.replicas[one.home] for one in requests])
        results: dict[int, Result] = {}
        done = asyncio.Event()
        headers = key_headers(self.settings.api_key_env, error=TeacherError)

        async def work(replica: Replica, session: httpx.AsyncClient) -> None:
            while True:
                await replica.rested()
                place = await waiting.take(replica)
                if replica.resting:
                    await waiting.give_back(place)
                    continue
                try:
                    results[place] = await self._attempt(replica, session, headers, requests[place])
                except (UnreachableError, GarbledError):
                    await waiting.give_back(place)
                if len(results) == len(requests):
                    done.set()

        async with _client(self.settings.urls) as session:
            count = min(self.settings.max_in_flight, len(requests))
            workers = [asyncio.create_task(work(replica, session)) for replica in self.replicas for _ in range(count)]
            finished = asyncio.create_task(done.wait())
            try:
                await asyncio.wait([finished, *workers], timeout=self.settings.deadline, return_when=asyncio.FIRST_COMPLETED)
                for worker in workers:
                    if worker.done():
                        worker.result()  # its error
                if not done.is_set():
                    raise TeacherGoneError(
                        f"{self.who} answered {len(results)} of {len(requests)} requests within teacher.deadline "
                        f"({self.settings.deadline:g} s): raise it, or give the teacher more replicas"
                    )
            finally:
                for task in (finished, *workers):
                    task.cancel()
                await asyncio.gather(finished, *workers, return_exceptions=True)
        return [results[place] for place in range(len(requests))]

    async def _attempt(
        self, replica: Replica, session: httpx.AsyncClient, headers: dict[str, str], request: Request[Result]
    ) -> Result:
        """The answer; an `UnreachableError` or `GarbledError` if the request should be retried."""
        began = time.monotonic()
        try:
            content = await self._ask(replica, session, headers, request.path, request.body(), request.most_bytes)
            answer = request.read(content)
        except GarbledError as error:
            request.garbled += 1
            if request.garbled == MOST_GARBLED:
                raise TeacherError(f"{self.who} at {replica.url} responded {MOST_GARBLED} times with what is {error}") from None
            replica.failed(str(error), self.notify)
            raise
        except UnreachableError as error:
            replica.failed(str(error), self.notify)
            request.failing_since = request.failing_since or began
            if time.monotonic() - request.failing_since >= self.settings.patience:
                raise TeacherGoneError(
                    f"{self.who} did not answer for {self.settings.patience:g} s (teacher.patience); the last try, at "
                    f"{replica.url}: {error}. Start it again, or name another with teacher.urls"
                ) from None
            raise
        except TeacherGoneError:
            raise
        except TeacherError as error:
            raise type(error)(f"{self.who} at {replica.url}: {error}") from None
        replica.worked(self.notify)
        return answer

    async def _ask(
        self, replica: Replica, session: httpx.AsyncClient, headers: dict[str, str], path: str, body: Any, most_bytes: int
    ) -> bytes:
        """The response of one server to one request."""
        method, seconds = "GET" if body is None else "POST", self.settings.request_timeout
        try:
            status, content = await exchange(
                session, method, replica.url + path, headers=headers, body=body, seconds=seconds, most_bytes=most_bytes
            )
        except OversizedError as error:
            raise TeacherError(str(error)) from None
        if status == 200:
            return content
        words = hide_key(content.decode(errors="replace"), self.settings.api_key_env)
        if status >= 500:
            raise UnreachableError(f"HTTP {status} {words}".strip())
        if status in (401, 403):
            variable = self.settings.api_key_env
            hint = f"the key in {variable} is wrong" if variable else "name the key's variable: teacher.api_key_env"
            raise TeacherError(f"it denies access (HTTP {status} {words}): {hint}")
        raise TeacherError(f"it refuses {method} {path} (HTTP {status}): {words}")

    def ask(self, path: str, body: Any = None, read: Callable[[bytes], Any] = parse) -> dict[str, Any]:
        """The responses of all reachable servers to one request, by URL; waits until at least one responds. For checks."""

        async def one(replica: Replica, session: httpx.AsyncClient) -> Any:
            try:
                headers = key_headers(self.settings.api_key_env, error=TeacherError)
                answer = read(await self._ask(replica, session, headers, path, body, MOST_BYTES))
            except (UnreachableError, GarbledError) as error:
                replica.failed(str(error), self.notify)
                return error
            replica.worked(self.notify)
            return answer

        async def tries() -> dict[str, Any]:
            began, garbled = time.monotonic(), 0
            async with _client(self.settings.urls) as session:
                while True:
                    answers = await asyncio.gather(*(one(replica, session) for replica in self.replicas))
                    there = {r.url: a for r, a in zip(self.replicas, answers, strict=True) if not isinstance(a, Exception)}
                    if there:
                        return there
                    where = f"{self.who} at {', '.join(self.settings.urls)}"
                    garbled += any(isinstance(answer, GarbledError) for answer in answers)
                    if garbled == MOST_GARBLED:
                        raise TeacherError(f"{where} responds to {path} with what is {answers[0]}: is it a teacher server?")
                    if time.monotonic() - began >= self.settings.patience:
                        raise TeacherGoneError(f"{where} does not answer: {answers[0]}. Start it, or correct teacher.urls")
                    await self.replicas[0].rested()

        return run_async(tries())

    @property
    def who(self) -> str:
        return f"the teacher {self.name!r}" if self.name != "teacher" else "the teacher"


class _Waiting:
    """Places of requests that wait for a replica."""

    def __init__(self, homes: Sequence[Replica | None]) -> None:
        """`homes`: who should answer each request."""
        self._homes = homes
        self._places = deque(range(len(homes)))
        self._changed = asyncio.Condition()

    async def take(self, replica: Replica) -> int:
        """The next one for this replica: one that has it for its home, or none, or one that rests."""
        async with self._changed:
            while True:
                for place in self._places:
                    home = self._homes[place]
                    if home is None or home is replica or home.resting:
                        self._places.remove(place)
                        return place
                await self._changed.wait()

    async def give_back(self, place: int) -> None:
        async with self._changed:
            self._places.append(place)
            self._changed.notify_all()


def run_async(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine from any thread, also if an event loop is running (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    return in_background(lambda: asyncio.run(work)).result()


def _client(urls: Sequence[str]) -> httpx.AsyncClient:
    return httpx.AsyncClient(**client_settings(urls), timeout=httpx.Timeout(None, connect=CONNECT_SECONDS))
