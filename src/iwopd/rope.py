"""Rotary embeddings that do not look at the batch.

transformers chooses the frequencies of the RoPE types `longrope` and `dynamic` in every forward pass anew, from the longest
sequence in it: the log-probs of a rollout then depend on its neighbours, and a token's keys on when they were computed. Here
they are chosen once, from the longest sequence that a run can have, and hold for all tokens on all paths. vLLM does the same
for `longrope`. Configs stay as they are, and so do exported models.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from iwopd.model_facts import context_length, text_config
from iwopd.models import ModelError

FIXED = "fixed"
"""What a rotary module calls its type once its frequencies hold for all lengths."""
TOLERANCE = 1e-6


def follows_batch(rope_type: str) -> bool:
    """Whether transformers, or code like it, chooses frequencies of this type from the batch."""
    return rope_type in ("longrope", "su") or "dynamic" in rope_type


def rope_types(config: Any) -> dict[str | None, str]:
    """The RoPE type of each kind of layers that has its own, by its name, or of all, by None; empty without RoPE."""
    return {layer: own.get("rope_type") or own.get("type", "default") for layer, own in _parameters(config).items()}


def _parameters(config: Any) -> dict[str | None, dict[str, Any]]:
    text = text_config(config)
    found = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if found and all(isinstance(own, dict) or own is None for own in found.values()):
        return {layer: own for layer, own in found.items() if own}
    return {None: found} if found else {}


def rope_note(config: Any, longest: int) -> str | None:
    """What `fix_rope` does to a model of this config for sequences of up to `longest` tokens; None: nothing."""
    longest = _within_context(config, longest)
    notes = []
    for layer, kind in rope_types(config).items():
        if kind == "longrope":
            short = longest <= (first := _original_length(config, layer))
            compared = "do not exceed" if short else "exceed"
            which = "short" if short else "long"
            notes.append(f"{kind}: the {which} factors for all lengths, since {longest:,} tokens {compared} {first:,}")
        elif follows_batch(kind):
            notes.append(f"{kind}: the frequencies of {longest:,} tokens for all lengths")
    return "; ".join(dict.fromkeys(notes)) or None


def fix_rope(model: nn.Module, longest: int) -> str | None:
    """Choose the frequencies of all rotary embeddings for sequences of up to `longest` tokens, prompt and answer.

    Returns `rope_note` of the model. Refuses a model whose embeddings still depend on the batch.
    """
    config: Any = model.config
    longest, obstacle, fixed = _within_context(config, longest), None, 0
    for name, module in model.named_modules():
        if hasattr(module, "rope_type") and hasattr(module, "config"):
            fixed += sum(_fix(module, layer, kind, longest) for layer, kind in rope_types(module.config).items())
        if _looks_at_batch(module, longest):
            obstacle = f"{name!r}, a {type(module).__name__},"
    kinds = {kind for kind in rope_types(config).values() if follows_batch(kind)}
    if obstacle is None and kinds and not fixed:
        obstacle = f"{type(model).__name__} (rope_type {sorted(kinds)[0]!r}, in modules that are unknown here)"
    if obstacle is not None:
        raise ModelError(
            f"{obstacle} chooses its rotary frequencies from the longest sequence of a batch: with up to {longest:,} tokens, "
            "log-probs of an answer would depend on its neighbours. Lower rollout.max_tokens and data.max_prompt_tokens until "
            "they are the same for all lengths (original_max_position_embeddings in its config.json), or choose another model"
        )
    return rope_note(config, longest)


def _within_context(config: Any, longest: int) -> int:
    """Limits of prompt and answer together may exceed what the model has room for; sequences may not."""
    return min(longest, context_length(config) or longest)


def _original_length(config: Any, layer: str | None) -> int:
    """Tokens up to which `longrope` has its short factors."""
    text, own = text_config(config), _parameters(config)[layer]
    given = own.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    return int(given or text.max_position_embeddings)


def _fix(module: Any, layer: str | None, kind: str, longest: int) -> bool:
    """Whether there was something to fix. `layer` names the kind of layers, in modules that serve several."""
    if not follows_batch(kind) or kind not in ROPE_INIT_FUNCTIONS:
        return False
    prefix, of_layer = ("", {}) if layer is None else (f"{layer}_", {"layer_type": layer})
    before: Tensor = getattr(module, f"{prefix}inv_freq")
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, before.device, seq_len=longest, **of_layer)
    module.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)
    setattr(module, f"{prefix}attention_scaling", scaling)
    if layer is None:
        module.rope_type = FIXED
    else:
        module.rope_type = {**module.rope_type, layer: FIXED}
    return True


def _looks_at_batch(module: nn.Module, longest: int) -> bool:
    """Whether the first tokens turn otherwise beside a sequence of `longest` tokens. False for what is no rotary module."""
    device = next((buffer.device for name, buffer in module.named_buffers(recurse=False) if name.endswith("inv_freq")), None)
    if device is None or device.type == "meta":
        return False
    try:
        alone, beside = (list(_turns(module, torch.tensor([[0, 1, last]], device=device))) for last in (1, longest - 1))
    except Exception:  # a module that is called otherwise (of images, or an older kind) looks at no positions
        return False
    return any(not torch.allclose(a[:, :2], b[:, :2], atol=TOLERANCE, rtol=0) for a, b in zip(alone, beside, strict=True))


@torch.no_grad()
def _turns(module: Any, positions: Tensor) -> Iterator[Tensor]:
    """Cosines and sines [1, 3, D] of these positions, of all kinds of layers."""
    states = torch.zeros(1, 1, 1, device=positions.device)
    kinds: list[Any] = list(module.rope_type) if isinstance(getattr(module, "rope_type", None), dict) else [None]
    takes_kind = "layer_type" in inspect.signature(module.forward).parameters
    for kind in kinds:
        yield from module(states, positions, **({"layer_type": kind} if takes_kind and kind is not None else {}))
