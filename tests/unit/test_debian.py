"""The suite on a stranger's machine: no system package is installed that nobody asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import debian


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A machine of root with an apt-get that notes what it is asked for."""
    log, program = tmp_path / "log", tmp_path / "apt-get"
    program.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for name in ("CI", "IWOPD_APT"):
        monkeypatch.delenv(name, raising=False)
    debian.find.cache_clear()
    return lambda: log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("environment", [{}, {"CI": "false"}, {"IWOPD_APT": "0"}, {"CI": "true", "IWOPD_APT": "0"}])
def test_nothing_is_installed_unasked(
    apt: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert debian.find("no-such-command", "no-such-package") is None
    assert apt() == []
    assert "IWOPD_APT=1" in debian.missing("no-such-package")


@pytest.mark.parametrize("environment", [{"CI": "true"}, {"IWOPD_APT": "1"}])
def test_where_it_was_asked_for_it_is_said_before_it_is_done(
    apt: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], capfd: Any
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    debian.find("no-such-command", "no-such-package")
    assert [line.split()[0] for line in apt()] == ["update", "install"]
    assert debian.find("sh", "dash") is not None
    assert len(apt()) == 2  # what is there is not installed
    assert "installing the system package no-such-package" in capfd.readouterr().err
