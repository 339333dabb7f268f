"""One HTTP request to a teacher server: bounded in time and size, with a key that never shows in a message."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx

from iwopd.teacher.errors import TeacherError

CONNECT_SECONDS = 10.0
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class UnreachableError(Exception):
    """A transport error or a 5xx: worth another try."""


class GarbledError(Exception):
    """A whole answer that is not JSON."""


def client(urls: tuple[str, ...]) -> httpx.AsyncClient:
    """A client for one conversation. Proxies of the environment are not asked about servers on this machine."""
    here = all(urlsplit(url).hostname in LOOPBACK for url in urls)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(
        verify=_tls(), trust_env=not here, limits=limits, timeout=httpx.Timeout(None, connect=CONNECT_SECONDS)
    )


@cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # reads the certificates: once is enough


def key_headers(variable: str | None) -> dict[str, str]:
    """The key from the environment, read anew for every conversation and kept nowhere."""
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    if variable is not None:
        headers["Authorization"] = f"Bearer {_key(variable)}"
    return headers


def _key(variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not key:
        raise TeacherError(f"the environment variable {variable}, which should hold the teacher's API key, is empty")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise TeacherError(f"the API key in the environment variable {variable} has characters that no header may have")
    return key


def hide_key(text: str, variable: str | None, most: int = 300) -> str:
    """A server's words, on one line, without the key should it have repeated it."""
    key = os.environ.get(variable, "").strip() if variable else ""
    plain = text.replace(key, "[key]") if key else text
    return " ".join("".join(letter if letter.isprintable() else " " for letter in plain).split())[:most]


async def exchange(
    session: httpx.AsyncClient, method: str, url: str, *, headers: dict[str, str], body: Any, seconds: float, most_bytes: int
) -> tuple[int, bytes]:
    """Status and content. A body that grows beyond `most_bytes` is a `TeacherError`: no honest answer is that long."""
    content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
    try:
        async with asyncio.timeout(seconds), session.stream(method, url, content=content, headers=headers) as response:
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


def parse(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise GarbledError(f"not JSON: {error}") from None
