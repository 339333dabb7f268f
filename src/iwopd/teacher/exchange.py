"""One HTTP request to a teacher server, among many at once: bounded in time and size."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from iwopd.http_clients import CONNECT_SECONDS, client_settings, encode
from iwopd.teacher.errors import TeacherError


class UnreachableError(Exception):
    """A transport error or a 5xx: worth another try."""


def client(urls: Sequence[str]) -> httpx.AsyncClient:
    return httpx.AsyncClient(**client_settings(urls), timeout=httpx.Timeout(None, connect=CONNECT_SECONDS))


async def exchange(
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
