from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from iwopd import algo

VOCAB, REAL = 40, 33


def inputs(*shape: int, hidden_size: int = 6, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "hidden": randn(*shape, hidden_size),
        "weight": randn(VOCAB, hidden_size),
        "bias": randn(VOCAB),
        "targets": torch.randint(0, REAL, shape, generator=generator),
    }


def all_logprobs(data: dict[str, Tensor], temperature: float = 1.0, vocab_size: int = VOCAB, bias: bool = True) -> Tensor:
    """The naive way: [..., V]."""
    logits = data["hidden"] @ data["weight"].T + (data["bias"] if bias else 0.0)
    return (logits[..., :vocab_size] / temperature).log_softmax(-1)


@pytest.fixture(params=[3, 10_000], ids=["chunks of three rows", "one chunk"], autouse=True)
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iwopd.algo.head.CHUNK_ELEMENTS_CPU", request.param * VOCAB)
    monkeypatch.setattr("iwopd.algo.head.COLUMNS_CPU", 11 if request.param == 3 else 2**14)


OPTIONS: list[dict[str, Any]] = [{}, {"temperature": 0.6}, {"vocab_size": REAL}, {"temperature": 1.7, "vocab_size": REAL}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [(10,), (2, 5), (2, 1, 3), (), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_logprobs_and_gradients_are_the_naive_ones(shape: tuple[int, ...], options: dict[str, Any], with_bias: bool) -> None:
    data = inputs(*shape)
    names = ["hidden", "weight", "bias"] if with_bias else ["hidden", "weight"]
    leaves = {**data, **{name: data[name].clone().requires_grad_() for name in names}}
    expected = all_logprobs(leaves, bias=with_bias, **options).gather(-1, data["targets"][..., None]).squeeze(-1)
    upstream = torch.randn(shape, dtype=torch.float64)
    wanted = torch.autograd.grad(expected, [leaves[name] for name in names], upstream)

    ours = {name: data[name].clone().requires_grad_() for name in names}
    logprobs = algo.token_logprobs(**ours, targets=data["targets"], **options)
    assert logprobs.shape == shape
    torch.testing.assert_close(logprobs, expected)
    for name, got, want in zip(names, torch.autograd.grad(logprobs, list(ours.values()), upstream), wanted, strict=True):
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")


def test_float32_agrees_with_float64() -> None:
    double = inputs(64, hidden_size=32)
    single = {name: value if name == "targets" else value.float() for name, value in double.items()}
    results = []
    for data in (double, single):
        leaves = {name: value.requires_grad_() if name != "targets" else value for name, value in data.items()}
        logprobs = algo.token_logprobs(**leaves)
        logprobs.sum().backward()
        results.append([logprobs.detach(), *(leaves[name].grad for name in ("hidden", "weight", "bias"))])
    assert results[1][0] is not None
    assert results[1][0].dtype == torch.float32
    for exact, rounded in zip(*results, strict=True):
        assert exact is not None
        assert rounded is not None
        torch.testing.assert_close(rounded.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_read_exactly_and_summed_in_float32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("iwopd.algo.head.UPCAST_ELEMENTS", 6 * 7)  # seven rows at a time
    data = inputs(9, dtype=dtype)
    wide = {name: value if name == "targets" else value.double() for name, value in data.items()}
    expected = all_logprobs(wide).gather(-1, data["targets"][..., None]).squeeze(-1)
    hidden, weight = data["hidden"].clone().requires_grad_(), data["weight"].clone().requires_grad_()
    logprobs = algo.token_logprobs(hidden, weight, data["targets"], bias=data["bias"])
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == dtype
    assert weight.grad is not None
    assert weight.grad.dtype == dtype
    wide["hidden"].requires_grad_()
    all_logprobs(wide).gather(-1, data["targets"][..., None]).sum().backward()
    assert wide["hidden"].grad is not None
    torch.testing.assert_close(hidden.grad.double(), wide["hidden"].grad, rtol=2e-2, atol=2e-2)


def test_autocast_does_not_lower_the_precision() -> None:
    data = inputs(9, dtype=torch.float32)
    plain = algo.token_logprobs(**data)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(algo.token_logprobs(**data), plain)


def test_padding_rows_take_no_probability() -> None:
    data = inputs(6)
    data["bias"][REAL:] = 50.0  # would take everything
    targets = torch.tensor([0, 1, REAL - 1, REAL, VOCAB - 1, 5])
    weight = data["weight"].clone().requires_grad_()
    logprobs = algo.token_logprobs(data["hidden"], weight, targets, bias=data["bias"], vocab_size=REAL)
    everything = torch.stack(
        [
            algo.token_logprobs(data["hidden"], weight, torch.full((6,), i), bias=data["bias"], vocab_size=REAL)
            for i in range(VOCAB)
        ]
    )
    torch.testing.assert_close(everything.exp().sum(0), torch.ones(6, dtype=torch.float64))
    assert torch.isneginf(logprobs[3:5]).all()
    assert torch.isfinite(logprobs[[0, 1, 2, 5]]).all()
    logprobs.backward(torch.ones_like(logprobs))
    assert weight.grad is not None
    assert torch.isfinite(weight.grad).all()
    assert not weight.grad[REAL:].any()


def test_extreme_logits_stay_finite() -> None:
    hidden, weight = torch.tensor([[1e4]]), torch.tensor([[1.0], [0.0], [-1.0]])
    logprobs = [float(algo.token_logprobs(hidden, weight, torch.tensor([i]))) for i in range(3)]
    assert logprobs == [0.0, -1e4, -2e4]


def test_backward_under_autocast_is_in_full_precision_too() -> None:
    data = inputs(9, dtype=torch.float32)
    gradients = []
    for enabled in (False, True):
        weight = data["weight"].clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            algo.token_logprobs(data["hidden"], weight, data["targets"]).sum().backward()
        gradients.append(weight.grad)
    assert gradients[0] is not None
    assert torch.equal(gradients[0], gradients[1])


def test_padding_that_nobody_asks_about_may_hold_anything() -> None:
    """Hidden states of padding are NaN: values there are too, but gradients are clean where the loss does not look."""
    data, teacher = inputs(6), inputs(6, hidden_size=9, seed=1)
    look = torch.tensor([True, True, False, True, False, True])
    data["hidden"][~look] = float("nan")
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda weight: algo.token_logprobs(data["hidden"], weight, data["targets"]),
        lambda weight: algo.token_entropy(data["hidden"], weight),
        lambda weight: algo.token_kl(data["hidden"], weight, teacher["hidden"], teacher["weight"]),
    ]
    for call in calls:
        weight = data["weight"].clone().requires_grad_()
        torch.where(look, call(weight), 0.0).sum().backward()
        assert weight.grad is not None
        assert torch.isfinite(weight.grad).all()
        assert weight.grad.any()


def test_banned_ids_have_no_part_in_entropy_and_kl() -> None:
    data, teacher = inputs(4), inputs(4, hidden_size=9, seed=1)
    bias = torch.zeros(VOCAB, dtype=torch.float64)
    bias[REAL:] = -torch.inf
    both = {"bias": bias, "teacher_bias": bias}
    weight = data["weight"].clone().requires_grad_()
    entropy = algo.token_entropy(data["hidden"], weight, bias=bias)
    torch.testing.assert_close(entropy, algo.token_entropy(data["hidden"], data["weight"], vocab_size=REAL))
    for direction in ("reverse", "forward"):
        pair = (teacher["hidden"], teacher["weight"])
        banned = algo.token_kl(data["hidden"], weight, *pair, direction=direction, **both)
        cut = algo.token_kl(data["hidden"], data["weight"], *pair, direction=direction, vocab_size=REAL)
        torch.testing.assert_close(banned, cut)
        (entropy.sum() + banned.sum()).backward(retain_graph=True)
    assert weight.grad is not None
    assert torch.isfinite(weight.grad).all()


def test_student_and_teacher_may_have_different_precision() -> None:
    data, teacher = inputs(5, dtype=torch.float32), inputs(5, hidden_size=9, seed=1)
    kl = algo.token_kl(data["hidden"], data["weight"], teacher["hidden"], teacher["weight"], teacher_bias=teacher["bias"])
    exact = algo.token_kl(
        data["hidden"].double(), data["weight"].double(), teacher["hidden"], teacher["weight"], teacher_bias=teacher["bias"]
    )
    assert kl.dtype == torch.float32
    torch.testing.assert_close(kl.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_entropy(options: dict[str, Any]) -> None:
    data = inputs(2, 5)
    logprobs = all_logprobs(data, **options)
    expected = -(logprobs.exp() * logprobs).sum(-1)
    hidden, weight, bias = data["hidden"], data["weight"], data["bias"]
    torch.testing.assert_close(algo.token_entropy(hidden, weight, bias=bias, **options), expected)
    leaves = tuple(tensor.clone().requires_grad_() for tensor in (hidden, weight, bias))
    torch.autograd.gradcheck(lambda h, w, b: algo.token_entropy(h, w, bias=b, **options), leaves, fast_mode=True)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_kl(options: dict[str, Any], direction: Literal["reverse", "forward"]) -> None:
    data, teacher = inputs(2, 5), inputs(2, 5, hidden_size=9, seed=1)
    p, q = all_logprobs(data, **options), all_logprobs(teacher, **options)
    expected = (p.exp() * (p - q)).sum(-1) if direction == "reverse" else (q.exp() * (q - p)).sum(-1)

    def kl(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return algo.token_kl(
            hidden,
            weight,
            teacher["hidden"],
            teacher["weight"],
            direction=direction,
            bias=bias,
            teacher_bias=teacher["bias"],
            **options,
        )

    arguments = (data["hidden"], data["weight"], data["bias"])
    torch.testing.assert_close(kl(*arguments), expected)
    torch.autograd.gradcheck(kl, tuple(tensor.clone().requires_grad_() for tensor in arguments), fast_mode=True)


def test_kl_of_a_model_with_itself_is_zero_and_the_teacher_gets_no_gradient() -> None:
    data = inputs(7)
    teacher_hidden = data["hidden"].clone().requires_grad_()
    teacher_weight = data["weight"].clone().requires_grad_()
    weight = data["weight"].clone().requires_grad_()
    kl = algo.token_kl(data["hidden"], weight, teacher_hidden, teacher_weight)
    torch.testing.assert_close(kl, torch.zeros(7, dtype=torch.float64))
    kl.sum().backward()
    assert teacher_hidden.grad is None
    assert teacher_weight.grad is None
    assert weight.grad is not None


def test_opd_gradient_is_the_exact_gradient_of_the_local_kl() -> None:
    """Appendix A.3: E_{a ~ student}[A(a) * grad log pi(a)] = -grad KL(student || teacher), for every prefix at once."""
    data, teacher = inputs(4), inputs(4, hidden_size=9, seed=1)
    weight = data["weight"].clone().requires_grad_()
    kl = algo.token_kl(data["hidden"], weight, teacher["hidden"], teacher["weight"])
    (exact,) = torch.autograd.grad(kl.sum(), weight)
    total = torch.zeros_like(weight)
    for token in range(VOCAB):
        targets = torch.full((4,), token)
        logprobs = algo.token_logprobs(data["hidden"], weight, targets)
        teacher_logprobs = algo.token_logprobs(teacher["hidden"], teacher["weight"], targets)
        advantages = algo.opd_advantages(teacher_logprobs, logprobs.detach(), torch.ones(4, dtype=torch.bool))
        # The policy loss on every token of the vocabulary, weighted by how often the student would sample it.
        loss = algo.policy_loss(
            logprobs,
            logprobs.detach(),
            advantages * logprobs.detach().exp(),
            torch.ones(4, dtype=torch.bool),
            denominator=1,
        ).loss
        total += torch.autograd.grad(loss, weight)[0]
    torch.testing.assert_close(total, exact)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: algo.token_logprobs(d["hidden"], d["weight"].T, d["targets"]), r"must be \[..., H\] and \[V, H\]"),
        (lambda d: algo.token_logprobs(d["hidden"], d["weight"], d["targets"][:2]), r"targets have shape \[2\]"),
        (lambda d: algo.token_logprobs(**d, temperature=0.0), "temperature must be positive, got 0.0"),
        (lambda d: algo.token_logprobs(**d, vocab_size=41), "vocab_size is 41, the output matrix has 40 rows"),
        (lambda d: algo.token_logprobs(**{**d, "targets": d["targets"] + 20}), "the vocabulary ends at 39"),
        (lambda d: algo.token_logprobs(**{**d, "targets": d["targets"] - 40}), r"targets hold ids -\d+"),
        (lambda d: algo.token_logprobs(**{**d, "bias": d["bias"][:3]}), r"bias has shape \[3\]"),
        (
            lambda d: algo.token_kl(d["hidden"], d["weight"], d["hidden"], d["weight"][:REAL]),
            "student vocabulary has 40 ids, teacher 33: pass vocab_size",
        ),
        (lambda d: algo.token_kl(d["hidden"], d["weight"], d["hidden"][:2], d["weight"]), r"student has tokens \[30\]"),
        (
            lambda d: algo.token_kl(d["hidden"], d["weight"], d["hidden"], d["weight"], direction="both"),
            "direction must be 'reverse' or 'forward', got 'both'",
        ),
    ],
)
def test_bad_arguments_are_named(call: Callable[[dict[str, Tensor]], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(inputs(30))


def test_targets_must_be_integers() -> None:
    data = inputs(3)
    with pytest.raises(TypeError, match=r"targets must be token ids \(integers\), got torch.float64"):
        algo.token_logprobs(data["hidden"], data["weight"], data["targets"].double())
