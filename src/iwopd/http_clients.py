"""What all our HTTP clients share: keys that never show, servers on this machine without a proxy, answers in JSON that are
bounded in size and time and never unpacked.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import cache, lru_cache
from html.entities import html5
from typing import Any
from urllib.parse import urlsplit

import httpx

CONNECT_SECONDS = 10.0
HIDDEN = "[key]"
LEAST_KEY = 8
"""Letters of a key that is looked for in whole answers: a shorter one may be there by chance."""
LONG_KEY = 128
"""Letters of a key that is known by its first half of them."""
SHORT_ANSWER = 2**16
"""Bytes of an answer that is looked through for every spelling of a key."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
ENCODINGS = ("gzip", "x-gzip", "deflate", "br", "zstd", "compress")

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
    """An answer in which the key of the question is hidden, before anybody reads it: no error can show it then.

    A long answer consists of numbers: there it is looked for as it is, and where there are escapes.
    """
    key = _sent(headers)
    if len(key) < LEAST_KEY:
        return content
    if (plain := key.encode()) in content:
        content = content.replace(plain, HIDDEN.encode())
    size = int.from_bytes(content[:8], "little")
    end = 8 + size if content[8:9] == b"{" and size < len(content) else len(content)  # safetensors have words in front only
    words = content[:end]
    if b"\\" in words or len(words) < SHORT_ANSWER:
        words = _spellings(key).sub(HIDDEN, words.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
    return words + content[end:]


def _sent(headers: Mapping[str, str]) -> str:
    return headers.get("Authorization", "").removeprefix("Bearer ")


@lru_cache(maxsize=16)
def _spellings(key: str) -> re.Pattern[str]:
    """A key as JSON, JavaScript, URLs, HTML, mail, UTF-16, base64, hexadecimal and other letters write it, also one inside the
    other, in pieces, or cut off. Nothing is tried twice, and repetitions are bounded: others write the text.
    """
    known = min(max(LEAST_KEY, (len(key) + 1) // 2), LONG_KEY // 2)
    ways = [_GAP.join(map(_letter, key))] if len(key) <= LONG_KEY else []
    if len(key) > known:  # cut off: with what follows
        rest = rf"(?>[^\s\"'<>,;\\]|\\{{1,8}}[ux0-7/]){{0,{12 * len(key)}}}+"
        ways.append(_GAP.join(map(_letter, key[:known])) + rest)
    if len(key) >= LEAST_KEY:
        ways.append(key.encode().hex())
        ways += [f"(?-i:{re.escape(packed)})" for packed in _packed(key.encode())]
    return re.compile("|".join(ways), re.IGNORECASE)


_UNSEEN = r"[\s\x00\u00ad\u200b-\u200f\u2060\ufeff]"
_GAP = rf"(?>{_UNSEEN}|\\{{1,8}}(?:(?-i:[nrt])|(?-i:u)(?:00(?:0[0-9a-d]|20|ad)|200[b-f]|2060|feff))){{0,3}}+"
"""What may stand between two letters: the zeros of UTF-16 and UTF-32, the end of a line, what nobody sees."""


def _letter(one: str) -> str:
    code, wide = ord(one), ord(one) + 0xFEE0
    escaped = rf"\\{{1,8}}(?:u{code:04x}|u{wide:04x}|x{code:02x}|u\{{0{{0,4}}{code:x}\}}|(?-i:U){code:08x}|{code:03o})"
    url = rf"%(?:25){{0,4}}{code:02x}|={code:02x}"
    names = "".join(f"|{name}" for name in _NAMES.get(one, ()))
    html = rf"&(?:amp;){{0,4}}(?:\#0{{0,4}}{code}|\#x0{{0,4}}{code:x}{names});"
    plain = rf"\\{{0,8}}{re.escape(one)}" if one != "\\" else r"(?:\\\\){1,4}|\\"  # of three the last one is no longer its own
    return rf"(?>{escaped}|{url}|{html}|{chr(wide)}|{plain})"


_NAMES: dict[str, list[str]] = {}
"""What HTML calls the signs that keys may have."""
for _name, _sign in html5.items():
    if _name.endswith(";") and len(_sign) == 1 and "!" <= _sign <= "~":
        _NAMES.setdefault(_sign, []).append(_name.removesuffix(";"))


def _packed(key: bytes) -> set[str]:
    """The letters of base64 that are the key's alone, wherever in a text it begins."""
    found = set()
    for before in range(3):
        code = base64.b64encode(bytes(before) + key).decode()
        core = code[-(-8 * before // 6) : (before + len(key)) * 8 // 6]
        found |= {core, core.translate(str.maketrans("+/", "-_"))}
    return found


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
    except httpx.TransportError as error:  # its words may be the server's
        words = without_key(str(error).encode(errors="replace"), headers).decode()
        raise UnreachableError(f"{type(error).__name__}: {words}" if words else type(error).__name__) from None


async def bounded(response: httpx.Response, most_bytes: int) -> AsyncIterator[bytes]:
    """The pieces of an answer as they come. A megabyte may unpack to a thousand: we ask for plain ones, and take no others."""
    if (encoding := response.headers.get("Content-Encoding", "identity").strip().lower()) not in ("", "identity"):
        shown = encoding if encoding in ENCODINGS else "in a way of its own"
        raise GarbledError(f"packed ({shown}), although it was asked for plainly")
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
        return json.loads(content.decode("utf-8-sig"))  # bytes would be taken for UTF-16, too
    except (ValueError, RecursionError) as error:
        raise GarbledError(f"not JSON: {error}") from None
