"""A scorer over HTTP: any server that returns the log-probs of given token ids, in one or several replicas.

Requests are bounded in number, size and time. Transport errors and 5xx are retried, on another replica if there is one,
for `patience` seconds; a refusal (4xx) or a wrong response is an error at once. Servers score at temperature 1.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import torch
from torch import Tensor

from iwopd.background import in_background
from iwopd.config.engines import TeacherSource
from iwopd.http_clients import CONNECT_SECONDS, GarbledError, client_settings, encode, hide_key, key_headers, parse
from iwopd.teacher.checks import check_server
from iwopd.teacher.dialects import DIALECTS, TokenSequence
from iwopd.teacher.errors import TeacherError, TeacherGoneError
from iwopd.teacher.replicas import Replica
from iwopd.teacher.scorer import Scorer, ScoringPath
from iwopd.types import Prompt, Rollout

MOST_GARBLED = 3
"""A request fails when this many of its responses are not JSON."""
EXAMPLES = 4
"""Prompts on which a server is tried out."""
BYTES_PER_TOKEN = 2**10
BYTES_PER_ANSWER = 2**18

Result = TypeVar("Result")
Notify = Callable[[str], None]


class UnreachableError(Exception):
    """A transport error or a 5xx: worth another try."""


@dataclass
class _Request:
    """Sequences that are sent together."""

    rows: list[int]
    sequences: list[TokenSequence]
    failing_since: float | None = None
    garbled: int = 0

    @property
    def most_bytes(self) -> int:
        return BYTES_PER_ANSWER + BYTES_PER_TOKEN * sum(len(sequence.ids) for sequence in self.sequences)


class ServerScorer(Scorer):
    """Log-probs of given rollouts from a server."""

    def __init__(
        self, settings: TeacherSource, *, model: str | None = None, name: str = "teacher", notify: Notify = lambda _: None
    ) -> None:
        """`model` is what the servers call it, where `settings` do not say; None: the only one they have."""
        self.settings, self.name, self.notify = settings, name, notify
        self.model = settings.name or model
        self.dialect = DIALECTS[settings.dialect]
        self.replicas = [Replica(url) for url in settings.urls]

    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        sequences = [
            TokenSequence((*rollout.prompt.token_ids, *rollout.response_ids.tolist()), len(rollout.prompt.token_ids))
            for rollout in rollouts
        ]
        return [torch.tensor(values, dtype=torch.float32) for values in self.score_ids(sequences)]

    def paths(self, name: str) -> Iterator[ScoringPath]:
        """One for each replica, whose precision is its own affair."""
        for url in self.settings.urls:
            alone = ServerScorer(self.settings.model_copy(update={"urls": [url], "name": self.model}), name=self.name)
            yield ScoringPath(f"{name} ({url})", name, alone, half=True)

    def try_out(self, prompts: Sequence[Prompt], *, vocab_size: int, max_tokens: int) -> None:
        """The server must have room for the longest prompt and its answer, and score what it is asked."""
        longest = max((len(prompt.token_ids) for prompt in prompts), default=0) + max_tokens
        check_server(self, vocab_size=vocab_size, longest=longest, examples=[p.token_ids for p in prompts[:EXAMPLES]])

    def score_ids(self, sequences: Sequence[TokenSequence]) -> list[list[float]]:
        """Log-probs of the ids from `start` on, in order."""
        requests = self._requests(sequences)
        scores: dict[int, list[float]] = {}
        for rows, values in run_async(self._converse(requests)) if requests else []:
            scores.update(zip(rows, values, strict=True))
        return [scores.get(row, []) for row in range(len(sequences))]

    def _requests(self, sequences: Sequence[TokenSequence]) -> list[_Request]:
        """Sequences grouped up to `tokens_per_request` tokens, with enough requests to keep every replica busy."""
        rows = [row for row, sequence in enumerate(sequences) if sequence.start < len(sequence.ids)]
        most_rows = max(1, -(-len(rows) // (2 * len(self.replicas)))) if len(self.replicas) > 1 else len(rows)
        requests: list[_Request] = []
        room = 0
        for row in sorted(rows, key=lambda row: -len(sequences[row].ids)):
            length = len(sequences[row].ids)
            if not requests or length > room or len(requests[-1].rows) == most_rows:
                requests.append(_Request([], []))
                room = self.settings.tokens_per_request
            requests[-1].rows.append(row)
            requests[-1].sequences.append(sequences[row])
            room -= length
        return requests

    async def _converse(self, requests: list[_Request]) -> list[tuple[list[int], list[list[float]]]]:
        """The workers of all replicas share one queue; a failed request goes back into it for the next free worker."""
        waiting: asyncio.Queue[_Request] = asyncio.Queue()
        for request in requests:
            waiting.put_nowait(request)
        results: list[tuple[list[int], list[list[float]]]] = []
        done = asyncio.Event()
        headers = key_headers(self.settings.api_key_env, error=TeacherError)

        async def work(replica: Replica, session: httpx.AsyncClient) -> None:
            while True:
                await replica.rested()
                request = await waiting.get()
                if replica.resting:
                    waiting.put_nowait(request)
                    continue
                scores = await self._attempt(replica, session, headers, request)
                if scores is None:
                    waiting.put_nowait(request)
                else:
                    results.append((request.rows, scores))
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
                        f"{self._who} answered {len(results)} of {len(requests)} requests within teacher.deadline "
                        f"({self.settings.deadline:g} s): raise it, or give the teacher more replicas"
                    )
            finally:
                for task in (finished, *workers):
                    task.cancel()
                await asyncio.gather(finished, *workers, return_exceptions=True)
        return results

    async def _attempt(
        self, replica: Replica, session: httpx.AsyncClient, headers: dict[str, str], request: _Request
    ) -> list[list[float]] | None:
        """The scores; None if the request should be retried."""
        began = time.monotonic()
        body = self.dialect.scoring(self.model, request.sequences)
        try:
            answer = await self._ask(replica, session, headers, self.dialect.path, body, request.most_bytes)
            scores = self.dialect.scores(answer, request.sequences)
        except GarbledError as error:
            request.garbled += 1
            if request.garbled == MOST_GARBLED:
                raise TeacherError(
                    f"{self._who} at {replica.url} responded {MOST_GARBLED} times with what is {error}"
                ) from None
            replica.failed(str(error), self.notify)
        except UnreachableError as error:
            replica.failed(str(error), self.notify)
            request.failing_since = request.failing_since or began
            if time.monotonic() - request.failing_since >= self.settings.patience:
                raise TeacherGoneError(
                    f"{self._who} did not answer for {self.settings.patience:g} s (teacher.patience); the last try, at "
                    f"{replica.url}: {error}. Start it again, or name another with teacher.urls"
                ) from None
        except TeacherGoneError:
            raise
        except TeacherError as error:
            raise type(error)(f"{self._who} at {replica.url}: {error}") from None
        else:
            replica.worked(self.notify)
            return scores
        return None

    async def _ask(
        self, replica: Replica, session: httpx.AsyncClient, headers: dict[str, str], path: str, body: Any, most_bytes: int
    ) -> Any:
        """The parsed response of one server to one request."""
        method, seconds = "GET" if body is None else "POST", self.settings.request_timeout
        status, content = await _exchange(
            session, method, replica.url + path, headers=headers, body=body, seconds=seconds, most_bytes=most_bytes
        )
        if status == 200:
            return parse(content)
        words = hide_key(content.decode(errors="replace"), self.settings.api_key_env)
        if status >= 500:
            raise UnreachableError(f"HTTP {status} {words}".strip())
        if status in (401, 403):
            variable = self.settings.api_key_env
            hint = f"the key in {variable} is wrong" if variable else "name the key's variable: teacher.api_key_env"
            raise TeacherError(f"it denies access (HTTP {status} {words}): {hint}")
        raise TeacherError(f"it refuses {method} {path} (HTTP {status}): {words}")

    def ask(self, path: str, body: Any = None) -> dict[str, Any]:
        """The responses of all reachable servers to one request, by URL; waits until at least one responds. For checks."""

        async def one(replica: Replica, session: httpx.AsyncClient) -> Any:
            try:
                headers = key_headers(self.settings.api_key_env, error=TeacherError)
                answer = await self._ask(replica, session, headers, path, body, 16 * BYTES_PER_ANSWER)
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
                    where = f"{self._who} at {', '.join(self.settings.urls)}"
                    garbled += any(isinstance(answer, GarbledError) for answer in answers)
                    if garbled == MOST_GARBLED:
                        raise TeacherError(f"{where} responds to {path} with what is {answers[0]}: is it a teacher server?")
                    if time.monotonic() - began >= self.settings.patience:
                        raise TeacherGoneError(f"{where} does not answer: {answers[0]}. Start it, or correct teacher.urls")
                    await self.replicas[0].rested()

        return run_async(tries())

    @property
    def _who(self) -> str:
        return f"the teacher {self.name!r}" if self.name != "teacher" else "the teacher"


def run_async(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine from any thread, also if an event loop is running (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    return in_background(lambda: asyncio.run(work)).result()


def _client(urls: Sequence[str]) -> httpx.AsyncClient:
    return httpx.AsyncClient(**client_settings(urls), timeout=httpx.Timeout(None, connect=CONNECT_SECONDS))


async def _exchange(
    session: httpx.AsyncClient, method: str, url: str, *, headers: dict[str, str], body: Any, seconds: float, most_bytes: int
) -> tuple[int, bytes]:
    """Status and content. A body that grows beyond `most_bytes` is a `TeacherError`: no honest answer is that long."""
    try:
        async with asyncio.timeout(seconds), session.stream(method, url, content=encode(body), headers=headers) as response:
            pieces, size = [], 0
            async for piece in response.aiter_raw():
                pieces.append(piece)
                size += len(piece)
                if size > most_bytes:
                    raise TeacherError(f"the answer has more than {most_bytes} bytes, far more than the question needs")
            return response.status_code, b"".join(pieces)
    except TimeoutError:
        raise UnreachableError(f"no whole answer within {seconds:g} s") from None
    except httpx.TransportError as error:
        raise UnreachableError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from None
