"""FlashAttention's kernels take half precision only: which models of a recipe would give them float32."""

from __future__ import annotations

from collections.abc import Iterator

from iwopd.config import Config
from iwopd.train.refusals import Refused
from iwopd.train.teachers import has_local_teacher


def flash_refuses(config: Config) -> Iterator[Refused]:
    """Models in float32 without autocast, where `models.attention` names a FlashAttention."""
    models, attention = config.models, config.models.attention
    if attention is None or not attention.startswith("flash_attention"):
        return
    words = f"but models.attention = {attention!r} computes in half precision only"
    if models.dtype == "float32" and config.precision == "no" and config.lora.quantize == "none":
        yield Refused(f"the student runs in float32, {words}", "set precision = 'bf16', or models.attention = 'sdpa'")
    if has_local_teacher(config) and (models.teacher_dtype or models.dtype) == "float32":
        remedy = "set models.teacher_dtype = 'bfloat16', or models.attention = 'sdpa'"
        yield Refused(f"the teacher is loaded in float32 (precision is the student's), {words}", remedy)
