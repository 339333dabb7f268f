"""What a recipe asks for that cannot be done, and the way out; found before anything is loaded."""

from __future__ import annotations

from typing import NamedTuple


class Refused(NamedTuple):
    message: str
    remedy: str
