"""What a check says: pass, warn or fail, with the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from iwopd.errors import UserError

Level = Literal["pass", "warn", "fail"]


class DoctorError(UserError, ValueError):
    """A recipe that would fail, or train on the wrong numbers."""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's output."""

    level: Level
    check: str
    """A word or two: what was looked at."""
    message: str
    remedy: str = ""
    details: str = ""
    """Further lines, such as a diff."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What was measured, by the names of metrics.jsonl: a run writes it into every record."""

    def text(self) -> str:
        line = f"{self.level:<4}  {self.check:<14}  {self.message}"
        if self.remedy:
            line += f". {self.remedy[0].upper()}{self.remedy[1:]}"
        return "\n".join([line, *(f"{'':22}{detail}" for detail in self.details.splitlines())])


def passed(check: str, message: str, numbers: Mapping[str, float] | None = None) -> Finding:
    return Finding("pass", check, message, numbers=numbers or {})


def warning(check: str, message: str, remedy: str, details: str = "", numbers: Mapping[str, float] | None = None) -> Finding:
    return Finding("warn", check, message, remedy, details, numbers or {})


def failure(check: str, message: str, remedy: str, details: str = "") -> Finding:
    return Finding("fail", check, message, remedy, details)


NEEDED = ("files", "data", "packages")
"""Checks of what training cannot begin without."""


def refuse(findings: Iterable[Finding], *, optional: bool = True) -> None:
    """Raise if anything failed, with every failure and every warning in the message: one may explain the other.

    `optional`: --no-doctor would leave these checks out.
    """
    told = [finding for finding in findings if finding.level != "pass"]
    if any(finding.level == "fail" for finding in told):
        lines = "\n".join(finding.text() for finding in told)
        optional = optional and not any(finding.level == "fail" and finding.check in NEEDED for finding in told)
        raise DoctorError(
            f"this recipe is refused before training:\n{lines}\n`iwopd doctor RECIPE` shows all checks"
            + ("; --no-doctor trains all the same" if optional else "")
        )


def listed(names: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
