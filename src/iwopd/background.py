"""Work in a daemon thread, which does not keep the process alive: stopping a run does not wait for a server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_background(work: Callable[[], Result]) -> Future[Result]:
    """Start `work` in a daemon thread; the future holds its result or error."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
