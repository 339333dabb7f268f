"""What all our HTTP clients share: keys that never show, servers on this machine without a proxy, answers read as JSON."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterable
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx

CONNECT_SECONDS = 10.0
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class GarbledError(Exception):
    """A whole answer that is not JSON."""


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
    """A server's words, on one line, without the key should it have repeated it."""
    key = os.environ.get(variable, "").strip() if variable else ""
    plain = text.replace(key, "[key]") if key else text
    return " ".join("".join(letter if letter.isprintable() else " " for letter in plain).split())[:most]


def encode(body: Any) -> bytes | None:
    return None if body is None else json.dumps(body, separators=(",", ":")).encode()


def parse(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise GarbledError(f"not JSON: {error}") from None
