"""A real Chromium for these tests: found, or installed where `debian` may; without it the tests are skipped, with a reason."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import debian
from waiting import PATIENCE

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def _unavailable(reason: str) -> None:
    pytest.skip(f"browser tests need Chromium and playwright: {reason}")


def _chromium() -> str | None:
    named = os.environ.get("IWOPD_CHROMIUM")
    if named:
        return shutil.which(named)
    known = next((path for name in ("chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
    return known or debian.find("chromium", "chromium")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One browser for the session."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        _unavailable("playwright is not installed; `make setup` installs it")
    path = _chromium()
    if path is None:
        _unavailable(f"{debian.missing('chromium')}, or say where it is with IWOPD_CHROMIUM=/path/to/chromium")
    with sync_playwright() as playwright:
        try:
            launched = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        except Error as error:
            _unavailable(f"{path} does not start: {str(error).splitlines()[0]}")
        yield launched
        launched.close()


class Opened:
    """A page from disk, with everything that it should not have done.

    `own_clock`: its timers follow `page.clock`, so that a test can let minutes pass without waiting for them.
    """

    def __init__(self, browser: Any, path: Path, *, own_clock: bool = False, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        self.context.set_default_timeout(1000 * PATIENCE)
        self.page = self.context.new_page()
        if own_clock:
            self.page.clock.install()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("dialog", self._refuse)
        self.page.on("popup", lambda popup: self.complaints.append(f"popup: {popup.url}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.address = path.resolve().as_uri()
        self.page.goto(self.address)

    def _refuse(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def everything_drawn(self) -> None:
        """Bring every chart to the screen once."""
        for plot in self.page.locator(".plot").all():
            plot.scroll_into_view_if_needed()
            plot.locator(".main-svg").first.wait_for()

    def check_quiet(self) -> None:
        """No console message, no error, and no request but for the file itself and images made in the page."""
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith((self.address, "blob:", "data:"))] == []


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    opened: list[Opened] = []

    def open_one(path: Path, **options: Any) -> Opened:
        opened.append(Opened(browser, path, **options))
        return opened[-1]

    yield open_one
    for one in opened:
        one.context.close()
