"""Kernels that a run needs, on the device, against the CPU's numbers in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from iwopd.rollout.noise import stream_key, uniforms
from iwopd.rollout.sampling import SamplingSettings, choose
from iwopd.train.doctor.findings import Finding, failure, listed, passed, warning

PRODUCTS = {"float32": 1e-5, "TF32": 5e-3, "bfloat16": 2e-2}
"""Largest error of a product, relative to its largest entry."""
ATTENTION = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
OPTIMIZER = 1e-5
LOGPROB = 1e-4
VOCABULARY = 151_936
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
FRUGAL = ("flash", "memory-efficient", "cuDNN")
"""Backends whose memory does not grow with the square of the length."""
BROKEN = "do not train here: kernels of this torch, driver or device are wrong; try another torch build"


def check_products(device: torch.device) -> Iterator[Finding]:
    """Matrix products in float32, bfloat16 and, on a GPU, TF32."""
    one, other = _numbers(192, 1024), _numbers(1024, 256)
    expected = one @ other
    kinds = ["float32", "bfloat16"] if device.type == "cpu" else list(PRODUCTS)
    for kind in kinds:
        dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
        with _tensor_float(kind == "TF32"):
            found = one.to(device, dtype) @ other.to(device, dtype)
        error, limit = relative_error(found, expected), PRODUCTS[kind]
        words = f"{kind} product: error {error:.1g} of the largest entry (at most {limit:g})"
        if error <= limit:
            yield passed("products", words)
        elif kind == "float32" and error <= PRODUCTS["TF32"]:
            yield failure(
                "products",
                f"{words}: float32 is computed as TF32, and log-probs lose three digits",
                "unset NVIDIA_TF32_OVERRIDE and TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
            )
        else:
            yield failure("products", words, BROKEN)


def check_attention(device: torch.device) -> Iterator[Finding]:
    """Attention of torch itself: which backends compute, forward and backward, in float32 and bfloat16."""
    for dtype, limit in ATTENTION.items():
        works: list[str] = []
        wrong: list[str] = []
        for name, backend in BACKENDS.items():
            error = _attention_error(device, dtype, backend)
            if error is not None:
                (works if error <= limit else wrong).append(name)
        kind = str(dtype).removeprefix("torch.")
        if wrong:
            yield failure("attention", f"{kind}: wrong numbers from {listed(wrong)} (error above {limit:g})", BROKEN)
        if not works:
            yield failure("attention", f"{kind}: no backend of scaled_dot_product_attention works", BROKEN)
        elif device.type != "cpu" and not set(works) & set(FRUGAL):
            yield warning(
                "attention",
                f"{kind}: only {listed(works)} works, whose memory grows with the square of the length",
                "install FlashAttention (pip install flash-attn --no-build-isolation), or keep answers short",
            )
        else:
            yield passed("attention", f"{kind}: {listed(works)} agree with float64 (error at most {limit:g}), with gradients")


def check_optimizer(device: torch.device) -> Iterator[Finding]:
    """Fused AdamW, three steps, against torch's plain one in float64."""

    def stepped(place: torch.device, dtype: torch.dtype, fused: bool) -> Tensor:
        weight = torch.nn.Parameter(_numbers(64, 64).to(place, dtype))
        optimizer = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.01, fused=fused)
        for step in range(3):
            weight.grad = _numbers(64, 64, seed=step + 1).to(place, dtype)
            optimizer.step()
        return weight.detach()

    error = relative_error(stepped(device, torch.float32, True), stepped(torch.device("cpu"), torch.float64, False))
    words = f"fused AdamW: error {error:.1g} after three steps (at most {OPTIMIZER:g})"
    yield passed("optimizer", words) if error <= OPTIMIZER else failure("optimizer", words, BROKEN)


def check_sampling(device: torch.device) -> Iterator[Finding]:
    """Sampling noise and draws at a large vocabulary: 64-bit integers, float64 sums, searches, sorts."""
    keys = torch.tensor([stream_key(0, 1, f"p{row}", 0) for row in range(32)])
    places = torch.arange(32) * 517
    noise = uniforms(keys, places)
    if not torch.equal(uniforms(keys.to(device), places.to(device)).cpu(), noise):
        yield failure("sampling", "noise from 64-bit integers is not the CPU's: rollouts could not be repeated", BROKEN)
    logits = (4 * _numbers(32, VOCABULARY)).float()
    for name, settings in (
        ("all ids", SamplingSettings(1)),
        ("top-p 0.95", SamplingSettings(1, top_p=0.95)),
        ("top-k 50", SamplingSettings(1, top_k=50)),
    ):
        here, there = choose(logits, noise, settings), choose(logits.to(device), noise.to(device), settings)
        same = here.ids == there.ids.cpu()
        # Rounding may move a draw at the border of two ids; more than one in 32 has another reason.
        error = float(torch.where(same, here.logprobs - there.logprobs.cpu(), 0.0).abs().max())
        words = f"{name}: {int(same.sum())} of 32 draws over {VOCABULARY:,} ids are the CPU's, log-probs within {error:.1g}"
        fine = int(same.sum()) >= 31 and error <= LOGPROB
        yield passed("sampling", words) if fine else failure("sampling", words, BROKEN)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected entry."""
    exact = expected.detach().double().cpu()
    return float((found.detach().double().cpu() - exact).abs().max() / exact.abs().max())


def _attention_error(device: torch.device, dtype: torch.dtype, backend: SDPBackend) -> float | None:
    """Of the output and the gradients; None if the backend does not take it."""
    tensors = [_numbers(1, 4, 96, 64, seed=seed) for seed in range(3)]
    exact = _attended(tensors, SDPBackend.MATH)
    try:
        found = _attended([values.to(device, dtype) for values in tensors], backend)
    except RuntimeError as error:
        if "No available kernel" in str(error) or "no viable backend" in str(error).lower():
            return None
        raise
    return max(relative_error(*pair) for pair in zip(found, exact, strict=True))


def _attended(tensors: list[Tensor], backend: SDPBackend) -> list[Tensor]:
    """Causal attention and its gradients, through one backend."""
    query, key, value = (values.clone().requires_grad_() for values in tensors)
    with sdpa_kernel([backend]):
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output.square().sum().backward()
    return [output, *(values.grad for values in (query, key, value) if values.grad is not None)]


@contextmanager
def _tensor_float(on: bool) -> Iterator[None]:
    """TF32 in float32 products."""
    before = torch.get_float32_matmul_precision()
    if on:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    """The same normal numbers in float64 everywhere."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
