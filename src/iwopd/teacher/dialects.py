"""The dialects by the name that `teacher.dialect` gives."""

from __future__ import annotations

from collections.abc import Callable

from iwopd.config.distributions import DialectName
from iwopd.teacher.own_dialect import OwnDialect
from iwopd.teacher.questions import Dialect
from iwopd.teacher.sglang_dialect import SglangDialect
from iwopd.teacher.vllm_dialect import VllmDialect

DIALECTS: dict[DialectName, Callable[[], Dialect]] = {"vllm": VllmDialect, "sglang": SglangDialect, "iwopd": OwnDialect}
