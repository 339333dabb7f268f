"""The local engine writes with the policy that is scored and trained, in the run's own precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from iwopd.config import make_config
from iwopd.rollout.engine import Student
from iwopd.rollout.lean_decoder import LeanDecoder
from iwopd.rollout.local import LocalEngine, LocalSampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.section import Section
from iwopd.teacher.local import LocalScorer
from iwopd.types import Prompt, Rollout
from models import make_model

PROMPTS = [Prompt(f"p{i}", tuple(1 + (3 * i + j) % 20 for j in range(2 + i))) for i in range(6)]


@pytest.fixture(autouse=True)
def _plain_bfloat16() -> Iterator[None]:
    """OneDNN's bfloat16 products crash on some virtual CPUs."""
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(True)


def build(kind: str = "qwen3") -> Any:
    return make_model(kind, hidden=64, layers=3).eval()


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def difference(rollouts: list[Rollout], scores: list[Tensor]) -> float:
    return float((torch.cat([rollout.rollout_logprobs for rollout in rollouts]) - torch.cat(scores)).abs().mean())


def write(model: Any, path: str, dtype: str | None) -> list[Rollout]:
    return LocalSampler(model, SamplingSettings(24), path=path, dtype=dtype).sample(PROMPTS, seed=0, step=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "path"), [("qwen3", "lean"), ("qwen3", "model"), ("llama", "lean")])
def test_under_autocast_it_writes_with_the_policy_that_is_scored(kind: str, path: str) -> None:
    """What is left is the rounding of other kernels; float32 beside bfloat16 scores is several times as far away."""
    model = build(kind)
    scorer = LocalScorer(model, autocast=autocast)
    ours, plain = write(model, path, "bfloat16"), write(model, path, None)
    assert difference(ours, scorer.score(ours)) < 0.6 * difference(plain, scorer.score(plain))
    assert difference(plain, LocalScorer(model).score(plain)) < 1e-5


@pytest.mark.parametrize("path", ["lean", "model"])
def test_weights_in_half_precision(path: str) -> None:
    """Sampler and scorer have the same weights; what differs is how each path rounds its states."""
    model = build("llama").to(torch.bfloat16)
    rollouts = write(model, path, None)
    assert difference(rollouts, LocalScorer(model).score(rollouts)) < 2e-2


def test_cache_and_products_are_half_and_the_rest_is_not() -> None:
    decoder = LeanDecoder(build(), width=8, dtype=torch.bfloat16)
    decoder.reserve(1, 8)
    ids = torch.tensor([[3, 4]])
    with torch.inference_mode():
        logits = decoder.admit(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([0]))
        assert logits.dtype == decoder.step(torch.tensor([5])).dtype == torch.float32
    assert {tensor.dtype for tensor in (*decoder.keys, *decoder.values)} == {torch.bfloat16}
    assert {matrix.dtype for layer in decoder.model.layers for matrix in layer.down.matrices} == {torch.bfloat16}
    assert decoder.model.embedding.dtype == decoder.model.head.matrices[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("dtype", "precision", "half"), [("float32", "no", None), ("float32", "bf16", "bfloat16"), ("bfloat16", "bf16", None)]
)
def test_the_engine_follows_the_run(dtype: str, precision: str, half: str | None) -> None:
    config = make_config({"models": {"world": "clean", "dtype": dtype}, "precision": precision})
    student = Student(build, 21, 21, dtype=config.models.dtype, computes=config.compute_dtype)
    engine = LocalEngine(student, Section())
    assert engine.dtype == config.compute_dtype
    assert engine.sampler(SamplingSettings(4)).half == (None if half is None else getattr(torch, half))


@pytest.mark.parametrize("path", ["lean", "model"])
def test_a_listener_has_its_own_precision(path: str) -> None:
    """The teacher scores finished rollouts while others are written; the student's precision is none of its business."""
    model, heard = build(), []
    sampler = LocalSampler(model, SamplingSettings(4), path=path, dtype="bfloat16")  # type: ignore[arg-type]
    sampler.sample(PROMPTS, seed=0, step=0, finished=lambda _, __: heard.append(torch.is_autocast_enabled("cpu")))
    assert heard == [False] * len(PROMPTS)
    assert not torch.is_autocast_enabled("cpu")
    assert "forward" not in vars(model.lm_head)


def half_only(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
    """A stand-in for FlashAttention, which needs a GPU: its rule for dtypes, with the casts that transformers does before."""
    if query.dtype == torch.float32 and torch.is_autocast_enabled("cpu"):
        query, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in (query, key, value))
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    return sdpa_attention_forward(module, query, key, value, mask, **options)


def test_attention_that_takes_half_precision_only() -> None:
    AttentionInterface.register("half_only", half_only)
    AttentionMaskInterface.register("half_only", sdpa_mask)
    model = build()
    expected = [rollout.response_ids.tolist() for rollout in write(model, "model", "bfloat16")]
    model.set_attn_implementation("half_only")
    assert [rollout.response_ids.tolist() for rollout in write(model, "model", "bfloat16")] == expected
    with pytest.raises(RuntimeError, match="FlashAttention only"):
        write(model, "model", None)
