"""A small server that speaks the Hugging Face hub's protocol for data sets, over a folder: `<folder>/<org>/<name>/<files>`."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


@contextmanager
def hub_server(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The server's address, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            asked.append(path)
            parts = path.strip("/").split("/")
            if parts[:2] == ["api", "datasets"] and (folder / parts[2] / parts[3]).is_dir():
                root = folder / parts[2] / parts[3]
                names = sorted(file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file())
                tree = [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in names]
                self._send(json.dumps(tree).encode(), "application/json", body)
            elif parts[0] == "datasets" and parts[3] == "resolve" and (folder / "/".join(parts[1:3] + parts[5:])).is_file():
                self._send((folder / "/".join(parts[1:3] + parts[5:])).read_bytes(), "application/octet-stream", body)
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.end_headers()

        def _send(self, content: bytes, kind: str, body: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *words: object) -> None:
            """Silence."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
