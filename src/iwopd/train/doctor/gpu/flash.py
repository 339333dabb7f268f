"""FlashAttention as a run uses it: packed sequences, float32 weights under bfloat16 autocast."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from iwopd import algo
from iwopd.teacher.local import LocalScorer
from iwopd.tiny.architecture import ModelSize, new_model
from iwopd.tiny.tokenizer import TOKENS
from iwopd.train.doctor.echo import TOLERANCE_HALF, own_logprobs
from iwopd.train.doctor.findings import Finding, failure, passed, warning
from iwopd.train.doctor.float32 import in_float32
from iwopd.types import Prompt, Rollout

FLASH = "flash_attention_2"
INSTALL = (
    "install it: pip install flash-attn --no-build-isolation (it must fit torch and CUDA), or set models.attention = 'sdpa'"
)


class Scored(NamedTuple):
    """Log-probs under bfloat16 autocast through one attention, against float32 through torch's own."""

    difference: float
    """Mean |difference| of a token."""
    obstacle: str | None
    """Why sequences are padded; None if they are packed."""


def check_flash(device: torch.device) -> Iterator[Finding]:
    if device.type == "cpu":
        yield passed("flash", "only GPUs have it")
        return
    if importlib.util.find_spec("flash_attn") is None:
        yield warning(
            "flash",
            "flash_attn is not installed: attention is torch's own (sdpa), and the sequences of a micro-batch are padded to "
            "equal lengths",
            INSTALL,
        )
        return
    try:
        scored = score_through(device, FLASH)
    except (RuntimeError, ImportError, ValueError) as error:
        yield failure("flash", f"flash_attn is installed, but does not run: {error}", INSTALL)
        return
    words = f"bfloat16 scores are {scored.difference:.2g} a token from float32's (at most {TOLERANCE_HALF:g})"
    if scored.difference > TOLERANCE_HALF:
        yield failure("flash", f"it computes something else: {words}", INSTALL)
    elif scored.obstacle is not None:
        yield warning("flash", f"{words}, but sequences are padded: {scored.obstacle}", "report it to us")
    else:
        yield passed("flash", f"sequences are packed; {words}; {_float32(device)}")


def score_through(device: torch.device, attention: str) -> Scored:
    """Sequences of different lengths through the run's own scorer with this attention."""
    model: Any = new_model(ModelSize(64, 2), "iwopd/doctor/attention")
    model.to(device)
    rollouts = _rollouts()
    with in_float32(model):
        exact = own_logprobs(model, rollouts, 1.0, len(TOKENS))
    model.set_attn_implementation(attention)
    autocast = partial(torch.autocast, device.type, torch.bfloat16)
    scorer = LocalScorer(model, vocab_size=len(TOKENS), autocast=autocast)
    scores = scorer.score(rollouts)
    return Scored(algo.mean_difference(torch.cat(scores).float(), torch.cat(exact)), scorer.lm.packing_obstacle)


def _float32(device: torch.device) -> str:
    """Whether it takes float32; its kernels do not."""
    model: Any = new_model(ModelSize(64, 1), "iwopd/doctor/attention")
    model.to(device)
    model.set_attn_implementation(FLASH)
    try:
        with torch.no_grad():
            model(input_ids=torch.tensor([[2, 3, 4]], device=device))
    except RuntimeError:
        return "it refuses float32: use it with precision = 'bf16'"
    return "it takes float32, too"


def _rollouts() -> list[Rollout]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for place, length in enumerate((23, 9, 9, 1, 17)):
        ids = torch.randint(2, len(TOKENS), (length + 4,), generator=generator)
        made.append(Rollout(Prompt(str(place), tuple(ids[:4].tolist())), ids[4:], torch.zeros(length), "length"))
    return made
