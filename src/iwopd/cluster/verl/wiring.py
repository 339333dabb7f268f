"""Tokens that verl's agent loop asks the student's tokenizer for, by the kind of model; without them the first rollouts fail.

The agent loop looks at `model_type` in config.json alone, so a model of a known kind with a tokenizer of its own is refused
however it renders. Our prompts have one turn and need none of these tokens, but there is no setting that says so.
"""

from __future__ import annotations

from typing import Any

from iwopd.cluster.verl.errors import VerlError

_CHATML = ("\n", "<|im_end|>")
_MINIMAX = ("\n", "[e~[")
_GLM = ("<|observation|>", "<|user|>")
_DEEPSEEK = ("<\uff5cend\u2581of\u2581sentence\uff5c>",)
WIRED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"), _CHATML),
    **dict.fromkeys(("minimax", "minimax_text_01", "minimax_m2"), _MINIMAX),
    **dict.fromkeys(("glm4_moe", "glm_moe_dsa"), _GLM),
    "gemma4": ("<|tool_response>",),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v4"), _DEEPSEEK),
}
"""Kinds of text models, and what each must encode as one token (a test asks verl)."""


def check_wiring(model_type: str | None, tokenizer: Any, student: str) -> None:
    """Refuse a tokenizer that verl would refuse when the first rollouts start."""
    for token in WIRED.get(model_type or "", ()):
        if not _is_one(tokenizer, token):
            raise VerlError(
                f"the student {student} is a {model_type!r} model, and its tokenizer has no token {token!r}, which verl's "
                f"agent loop asks every {model_type!r} model for: add it to the tokenizer (add_special_tokens) and save "
                "both, choose another student, or use the local engine"
            )


def _is_one(tokenizer: Any, token: str) -> bool:
    """As verl asks: the newline by encoding it, the others by name."""
    if token == "\n":
        return len(tokenizer.encode(token, add_special_tokens=False)) == 1
    return tokenizer.convert_tokens_to_ids(token) is not None
