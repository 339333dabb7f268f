"""How much there is to compute and to read. Exact arithmetic: `bench/plan.py` compares it with counted FLOPs.

A product of a [m, k] and a [k, n] matrix counts 2 m k n FLOPs; norms, softmax and other elementwise work count nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from iwopd.train.memory import ModelShape


def forward_flops(model: ModelShape, tokens: int, scored: int, *, causal: bool = True) -> float:
    """One sequence through the layers, and `scored` of its tokens through the output matrix.

    causal: count only the half of attention that a causal kernel computes; False: all of it, as torch's counter does.
    """
    attention = 4 * model.layers * model.attention_width * tokens**2 * (0.5 if causal else 1.0)
    return 2 * model.count.active * tokens + attention + 2 * model.count.head * scored


def update_flops(model: ModelShape, tokens: int, scored: int, *, recompute: bool, causal: bool = True) -> float:
    """Forward and backward of one sequence: three times the forward, four with recomputed layers.

    The output matrix takes three products in either case: logits, and the gradients of hidden states and matrix.
    """
    layers = forward_flops(model, tokens, 0, causal=causal)
    return (4 if recompute else 3) * layers + 6 * model.count.head * scored


def all_flops(
    model: ModelShape, prompt: int, answers: Sequence[int], *, update: bool = False, recompute: bool = False
) -> float:
    """Of many sequences: scores of the answers' tokens, or an update on them."""
    if update:
        return sum(update_flops(model, prompt + answer, answer, recompute=recompute) for answer in answers)
    return sum(forward_flops(model, prompt + answer, answer) for answer in answers)


def distribution_flops(teacher: ModelShape, tokens: int, scored: int, *, again: bool, causal: bool = True) -> float:
    """What whole distributions add to the update of one sequence: the teacher's logits of the scored tokens.

    again: its hidden states were not kept, so it reads the sequence once more.
    """
    return 2 * teacher.count.head * scored + (forward_flops(teacher, tokens, 0, causal=causal) if again else 0.0)


def reduced_bytes(model: ModelShape) -> float:
    """What passes each GPU's link once an update where weights are not sharded: a ring's sum of float32 gradients."""
    return 2 * 4 * model.count.total


def decode_flops(model: ModelShape, rows: int, context: float) -> float:
    """One decoding step of `rows` rows whose contexts add up to `context` tokens."""
    return 2 * (model.count.active + model.count.head) * rows + 4 * model.layers * model.attention_width * context


def decode_bytes(model: ModelShape, rows: int, context: float, weight_bytes: float = 2, cache_bytes: float = 2) -> float:
    """What one decoding step reads: the weights it meets, and the cache of all contexts.

    Of the experts it reads those that at least one row is sent to, if rows choose independently and evenly.
    """
    count = model.count
    touched = 1 - (1 - model.expert_share) ** rows
    weights = count.layers - count.experts + count.experts * touched + count.head
    return weights * weight_bytes + context * model.cache_elements * cache_bytes


def gathered_bytes(model: ModelShape, recompute: bool) -> float:
    """What FSDP sends through each GPU's link for one micro-batch: weights (bfloat16) for every pass, gradients (float32)."""
    return model.count.total * (2 * (3 if recompute else 2) + 4)
