"""What all our HTTP clients share: keys that never show, servers on this machine without a proxy, answers in JSON that are
bounded in size and time and never unpacked.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import cache, lru_cache
from typing import Any
from urllib.parse import urlsplit

import httpx

CONNECT_SECONDS = 10.0
HIDDEN = "[key]"
LEAST_KEY = 8
"""Letters of a key that is looked for in whole answers: a shorter one may be there by chance."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")


BYTES_PER_ANSWER = 2**18
BYTES_PER_TOKEN = 2**10
"""Of an honest answer in JSON, at most."""


class GarbledError(Exception):
    """A whole answer that cannot be read."""


class UnreachableError(Exception):
    """A transport error, or no whole answer in time: worth another try."""


class OversizedError(Exception):
    """An answer that grows beyond what the question needs."""


def client_settings(urls: Iterable[str]) -> dict[str, Any]:
    """For an httpx client. Proxies of the environment are not asked about servers on this machine."""
    return {
        "verify": _tls(),
        "trust_env": not all(urlsplit(url).hostname in LOOPBACK for url in urls),
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=None),
    }


@cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # reads the certificates: once is enough


def key_headers(variable: str | None, *, error: type[Exception]) -> dict[str, str]:
    """Headers with the key from the environment, read again for every conversation and kept nowhere."""
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    if variable is None:
        return headers
    key = os.environ.get(variable, "").strip()
    if not key:
        raise error(f"the environment variable {variable}, which should hold the server's API key, is empty")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise error(f"the API key in the environment variable {variable} has characters that no header may have")
    return {**headers, "Authorization": f"Bearer {key}"}


def hide_key(text: str, variable: str | None, most: int = 300) -> str:
    """A server's words, on one line, without the key should it have repeated it in whatever spelling."""
    key = os.environ.get(variable, "").strip() if variable else ""
    plain = _spellings(key).sub(HIDDEN, text) if key else text
    return " ".join("".join(letter if letter.isprintable() else " " for letter in plain).split())[:most]


def without_key(content: bytes, headers: Mapping[str, str]) -> bytes:
    """An answer in which the key of the question is hidden, before anybody reads it: no error can show it then."""
    key = headers.get("Authorization", "").removeprefix("Bearer ")
    if len(key) < LEAST_KEY:
        return content
    if (plain := key.encode()) in content:
        content = content.replace(plain, HIDDEN.encode())
    size = int.from_bytes(content[:8], "little")
    end = 8 + size if content[8:9] == b"{" and size < len(content) else len(content)  # safetensors have words in front only
    words = content[:end]
    if b"\\" in words:
        words = _spellings(key).sub(HIDDEN, words.decode("latin-1")).encode("latin-1")
    return words + content[end:]


@lru_cache(maxsize=16)
def _spellings(key: str) -> re.Pattern[str]:
    """A key as JSON, URLs and HTML may write it, also one inside the other. Repetitions are bounded: others write the text."""

    def letter(one: str) -> str:
        code = ord(one)
        return rf"(?:\\{{0,8}}{re.escape(one)}|(?i:\\{{1,8}}u{code:04x}|%{code:02x}|&\#(?:0{{0,4}}{code}|x0{{0,4}}{code:x});))"

    return re.compile("".join(map(letter, key)))


async def exchange(
    session: httpx.AsyncClient, method: str, url: str, *, headers: dict[str, str], body: Any, seconds: float, most_bytes: int
) -> tuple[int, bytes]:
    """Status and content of one answer, which has `seconds` from the first word to the last, however they drip."""
    data = body if isinstance(body, bytes) else encode(body)
    if isinstance(body, bytes):
        headers = {**headers, "Content-Type": "application/octet-stream"}
    try:
        async with asyncio.timeout(seconds), session.stream(method, url, content=data, headers=headers) as response:
            content = b"".join([piece async for piece in bounded(response, most_bytes)])
            return response.status_code, without_key(content, headers)
    except TimeoutError:
        raise UnreachableError(f"no whole answer within {seconds:g} s") from None
    except httpx.TransportError as error:
        raise UnreachableError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from None


async def bounded(response: httpx.Response, most_bytes: int) -> AsyncIterator[bytes]:
    """The pieces of an answer as they come. A megabyte may unpack to a thousand: we ask for plain ones, and take no others."""
    if (encoding := response.headers.get("Content-Encoding", "identity").strip().lower()) not in ("", "identity"):
        raise GarbledError(f"packed ({encoding[:20]}), although it was asked for plainly")
    size = 0
    async for piece in response.aiter_raw():
        size += len(piece)
        if size > most_bytes:
            raise OversizedError(f"the answer has more than {most_bytes} bytes, far more than the question needs")
        yield piece


def encode(body: Any) -> bytes | None:
    return None if body is None else json.dumps(body, separators=(",", ":")).encode()


def parse(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise GarbledError(f"not JSON: {error}") from None
