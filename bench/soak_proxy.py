"""A TCP proxy that misbehaves on demand: it passes bytes on, slows them down, drops connections, or answers rubbish."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Literal

Mood = Literal["pass", "slow", "drop", "garbage"]
RUBBISH = b'HTTP/1.1 200 OK\r\nContent-Length: 24\r\nConnection: close\r\n\r\n{"choices": [null, \xff\xfe 17'
SLOW_SECONDS = 1.0
"""Before every piece that is passed on by a slow proxy."""


class Proxy:
    """Listens on a port of its own and stands before the server at `port`, which may come and go."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.mood: Mood = "pass"
        self.delay = 0.0
        """Seconds before every piece, in a good mood."""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._pairs: set[tuple[socket.socket, socket.socket | None]] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def hang_up(self) -> None:
        """Close all connections that are open now."""
        with self._lock:
            pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            _close(*pair)

    def close(self) -> None:
        self._listening.close()
        self.hang_up()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server: socket.socket | None = None
        if self.mood == "garbage":
            with suppress(OSError):
                client.recv(65536)
                client.sendall(RUBBISH)
        elif self.mood != "drop":
            with suppress(OSError):
                server = socket.create_connection(("127.0.0.1", self.port), timeout=5)
                server.settimeout(None)
        if server is None:
            _close(client)
            return
        with self._lock:
            self._pairs.add((client, server))
        back = threading.Thread(target=self._pass_on, args=(server, client), daemon=True)
        back.start()
        self._pass_on(client, server)
        back.join()
        with self._lock:
            self._pairs.discard((client, server))
        _close(client, server)

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while piece := one.recv(65536):
                time.sleep(SLOW_SECONDS if self.mood == "slow" else self.delay)
                if self.mood in ("drop", "garbage"):
                    break
                other.sendall(piece)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _close(*ends: socket.socket | None) -> None:
    for end in ends:
        if end is not None:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
