"""What a recipe asks for and cannot get, known before models are loaded: training raises it, the doctor lists it."""

from __future__ import annotations

from typing import NamedTuple


class Refused(NamedTuple):
    message: str
    remedy: str
