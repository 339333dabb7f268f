"""The memory model against memory: what autograd really saves, and what torch's allocator really hands out.

Small models with the proportions of Qwen3-0.6B, 1.7B, 4B and 30B-A3B, on a CPU. The model is an upper bound, and no more than a
quarter above what was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from allocations import peak_bytes
from iwopd.adapters import add_adapter
from iwopd.algo.objectives import make_objective
from iwopd.config import Lora, Optim
from iwopd.lm import ResponseModel
from iwopd.teacher.local import LocalScorer
from iwopd.train.learner import Learner
from iwopd.train.memory import UPDATE, DeviceMemory, ModelShape, Pass, Tokens, TrainedModel
from iwopd.train.ranks import Ranks
from iwopd.train.scoring import evidence_of, loss_columns
from iwopd.types import Prompt, Rollout, ScoredRollout, TokenBatch

LEAST, MOST = 1.0, 1.25
TOKENS = 128
VOCABULARY = 64
SIZES = {  # width, inner size, heads, key heads, width of a head
    "0.6B": (32, 96, 16, 8, 4),
    "1.7B": (64, 192, 16, 8, 4),
    "4B": (80, 304, 32, 8, 4),
    "wide heads": (16, 16, 32, 1, 8),
    "wide inner": (16, 256, 1, 1, 16),
    "wide states": (256, 16, 1, 1, 16),
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 16, "num_experts_per_tok": 8}
"""Of 30B-A3B: eight experts a token, each a third as wide as the token."""
PRECISIONS = {"float32": (torch.float32, False), "autocast": (torch.float32, True), "bfloat16": (torch.bfloat16, False)}


def context(autocast: bool) -> Callable[[], AbstractContextManager[Any]]:
    return (lambda: torch.autocast("cpu", torch.bfloat16)) if autocast else nullcontext


def make(size: str, dtype: torch.dtype, layers: int = 3, *, experts: bool = False, kind: str = "qwen3") -> Any:
    torch.manual_seed(0)
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    common: dict[str, Any] = dict(zip(names, SIZES[size], strict=True))
    common |= {"vocab_size": VOCABULARY, "num_hidden_layers": layers, "tie_word_embeddings": True}
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**common)).to(dtype)
    if experts:
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **EXPERTS, decoder_sparse_step=1)).to(dtype)
    return Qwen3ForCausalLM(Qwen3Config(**common)).to(dtype)


def rollouts(count: int, tokens: int = TOKENS) -> list[Rollout]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCABULARY, (count, tokens), generator=generator)
    return [
        Rollout(Prompt(f"p{n}", tuple(row[:2].tolist())), row[2:], torch.zeros(tokens - 2), "length")
        for n, row in enumerate(ids)
    ]


# --- what autograd saves --------------------------------------------------------------------------------------------------


def saved_bytes(model: Any, autocast: bool) -> int:
    """By one pass, apart from weights and their copies in autocast's precision."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    matrices = {tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() > 1}
    matrices |= {tuple(reversed(shape)) for shape in matrices}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights and tuple(tensor.shape) not in matrices:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", enabled=autocast):
        out = model.base_model(input_ids=torch.ones(1, TOKENS - 3, dtype=torch.long), use_cache=False).last_hidden_state
    assert out.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("size", "rank", "experts"), [("0.6B", 0, False), ("4B", 0, False), ("4B", 4, False), ("1.7B", 0, True)]
)
def test_a_layer_saves_what_the_formula_says(size: str, rank: int, experts: bool, precision: str) -> None:
    """To the byte: three layers against two."""
    dtype, autocast = PRECISIONS[precision]
    found = []
    for layers in (2, 3):
        model = make(size, dtype, layers, experts=experts).train()
        shape = ModelShape.of(model.config)
        if rank:
            add_adapter(model, rank, 32.0, ["all-linear"])
        found.append(saved_bytes(model, autocast))
    one = Pass(shape, dtype.itemsize, autocast, rank)
    packed = one.compute_bytes * shape.attention_width  # only with several sequences in a row
    assert found[1] - found[0] == pytest.approx((TOKENS - 3) * (one.saved_by_layer - packed), abs=100)


# --- what the allocator hands out -----------------------------------------------------------------------------------------


def update_peak(model: Any, precision: str, checkpointing: bool, count: int = 2) -> int:
    """Of an update with as many micro-batches, the moments being there already."""
    lm = ResponseModel(model, vocab_size=VOCABULARY, autocast=context(PRECISIONS[precision][1]))
    objective = make_objective({"weights": "cumulative-share"})
    optim = Optim(gradient_checkpointing=checkpointing, token_budget=TOKENS)
    learner = Learner(lm, optim, objective, Ranks())

    def update(tokens: int) -> None:
        scores = torch.full((tokens - 2,), -2.0)
        batch = TokenBatch.collate([ScoredRollout(rollout, scores, scores + 0.5) for rollout in rollouts(count, tokens)])
        learner.update(batch, loss_columns(objective, batch, evidence_of(batch)), seed=0, step=1)

    update(4)
    return peak_bytes(lambda: update(TOKENS))


UPDATES = [  # size, precision, rank of an adapter, gradient checkpointing
    ("0.6B", "float32", 0, False),
    ("0.6B", "autocast", 0, False),
    ("0.6B", "autocast", 0, True),
    ("1.7B", "autocast", 0, True),
    ("4B", "autocast", 0, False),
    ("4B", "autocast", 0, True),
    ("4B", "bfloat16", 0, True),
    ("1.7B", "bfloat16", 4, True),
    ("1.7B", "autocast", 4, False),
    ("wide heads", "autocast", 0, True),
    ("wide inner", "bfloat16", 0, False),
    ("wide states", "autocast", 0, False),
]


@pytest.mark.parametrize(("size", "precision", "rank", "checkpointing"), UPDATES)
def test_an_update_takes_no_more(size: str, precision: str, rank: int, checkpointing: bool) -> None:
    """Gradients, activations, copies of autocast, head. Half precision has masters."""
    dtype, autocast = PRECISIONS[precision]
    model = make(size, dtype)
    shape = ModelShape.of(model.config)
    if rank:
        add_adapter(model, rank, 32.0, ["all-linear"])
    adapter = shape.adapter_parameters(Lora(rank=rank)) if rank else 0
    student = TrainedModel(shape, dtype.itemsize, autocast, adapter, rank, gradient_checkpointing=checkpointing)
    step = DeviceMemory(student=student, tokens=Tokens(update=TOKENS), on_gpu=False).step
    predicted = step.needed(*UPDATE) - sum(step.state.values())
    assert LEAST <= predicted / update_peak(model, precision, checkpointing) <= MOST


@pytest.mark.parametrize(("options", "most"), [({"experts": True}, MOST), ({"kind": "llama"}, 1.4)])
def test_other_architectures_take_no_more(options: dict[str, Any], most: float) -> None:
    """Llama takes less: it has no norms of queries and keys, which the formula counts."""
    model = make("1.7B", torch.float32, **options)
    student = TrainedModel(ModelShape.of(model.config), 4, autocast=False, gradient_checkpointing=False)
    step = DeviceMemory(student=student, tokens=Tokens(update=TOKENS), on_gpu=False).step
    predicted = step.needed(*UPDATE) - sum(step.state.values())
    assert LEAST <= predicted / update_peak(model, "float32", checkpointing=False) <= most


SCORES = [
    ("0.6B", "float32", False),
    ("0.6B", "autocast", False),
    ("4B", "autocast", False),
    ("4B", "bfloat16", False),
    ("wide inner", "bfloat16", False),
    ("wide states", "autocast", False),
    ("1.7B", "bfloat16", True),
]


@pytest.mark.parametrize(("size", "precision", "experts"), SCORES)
def test_scores_take_no_more(size: str, precision: str, experts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the path that a GPU takes: the model's own forward pass."""
    dtype, autocast = PRECISIONS[precision]
    monkeypatch.setattr(ResponseModel, "_is_lean", lambda _: False)
    model = make(size, dtype, experts=experts)
    scorer = LocalScorer(model, vocab_size=VOCABULARY, token_budget=TOKENS, autocast=context(autocast))
    assert experts or scorer.lm.packing_obstacle is None
    student = TrainedModel(ModelShape.of(model.config), dtype.itemsize, autocast)
    step = DeviceMemory(student=student, tokens=Tokens(update=TOKENS, scores=TOKENS), on_gpu=False).step
    predicted = sum(step.stages["scores"].values())
    assert LEAST <= predicted / peak_bytes(lambda: scorer.score(rollouts(2))) <= MOST
