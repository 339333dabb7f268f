"""What a recipe asks for that cannot be had, said before anything is loaded."""

from __future__ import annotations

from typing import NamedTuple


class Refused(NamedTuple):
    message: str
    remedy: str
