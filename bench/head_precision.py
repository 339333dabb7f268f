"""What the precision of the output head does to log-probs, gaps and gradients, emulated on a CPU: a minute or two.

    python bench/head_precision.py                         # vocabulary 151,936, hidden size 1,024, made-up states
    python bench/head_precision.py --pair real-run         # also a pair of models: folders `student` and `teacher` in it
                                                            # (bench/real.py makes one from SmolLM2-135M)

Operands of the head's products (logits, both gradients) are rounded as a tensor core would: TF32 keeps 10 bits of the mantissa
(to nearest, or cut off, which is the worse of what kernels do), bfloat16 keeps 7. Sums stay in float32. The reference is the
same head in float64. For a pair, the last row leaves the head in float32 and rounds the models' bodies instead: `precision =
"bf16"` (autocast), which is the noise that is there anyway.

The gap is `a = lp_T - lp_0` of the tokens that the student wrote, gradients are those of IW-OPD's loss. Speed is not measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from iwopd import algo
from iwopd.algo.evidence import Evidence
from iwopd.algo.head import OutputHead
from iwopd.algo.objectives import make_objective
from iwopd.lm import ResponseModel, Sequences
from iwopd.models import load_model, load_tokenizer, stop_ids
from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.types import Prompt

Rounding = Callable[[Tensor], Tensor]
MANTISSA_TF32 = 13
"""Low bits of a float32 that TF32 does not have."""
QUESTIONS = [
    "Anna has 12 apples and gives a third of them to Ben. How many are left?",
    "Explain in two sentences why the sky is blue.",
    "Write a short story about a robot that learns to paint.",
    "What is the derivative of x^3 + 2x?",
]


def cut_off(values: Tensor) -> Tensor:
    return (values.float().view(torch.int32) >> MANTISSA_TF32 << MANTISSA_TF32).view(torch.float32)


def nearest(values: Tensor) -> Tensor:
    bits = values.float().view(torch.int32)
    odd = (bits >> MANTISSA_TF32) & 1  # ties to even
    rounded_bits: Tensor = (bits + (2 ** (MANTISSA_TF32 - 1) - 1) + odd) >> MANTISSA_TF32 << MANTISSA_TF32
    return rounded_bits.view(torch.float32)


ROUNDINGS: dict[str, Rounding] = {
    "float32": lambda values: values,
    "tf32, to nearest": nearest,
    "tf32, cut off": cut_off,
    "bf16": lambda values: values.bfloat16().float(),
}


@contextmanager
def rounded(rounding: Rounding) -> Iterator[None]:
    """Every operand of the head's products, rounded."""
    plain = OutputHead.operand
    OutputHead.operand = lambda self, tensor: rounding(plain(self, tensor))  # type: ignore[method-assign]
    try:
        yield
    finally:
        OutputHead.operand = plain  # type: ignore[method-assign]


@dataclass
class Side:
    """A model's states [N, H] before its head, and the output matrix [V, H]."""

    hidden: Tensor
    weight: Tensor

    def logprobs(self, targets: Tensor) -> Tensor:
        return algo.token_logprobs(self.hidden, self.weight, targets)

    def double(self) -> Side:
        return Side(self.hidden.double(), self.weight)  # the matrix is converted block by block


def made_up(tokens: int, vocab: int, size: int) -> tuple[Side, Side, Tensor]:
    """Student, teacher and targets: logits with a standard deviation of 2.6, targets likely, unlikely and in between."""
    torch.manual_seed(0)
    targets = torch.randint(vocab, (tokens,))
    sides = []
    for low, high in ((12.0, 26.0), (8.0, 26.0)):
        weight = torch.randn(vocab, size).mul_(0.04)
        strength = torch.linspace(low, high, tokens)[torch.randperm(tokens), None]
        rows = weight[targets]
        sides.append(Side(2 * torch.randn(tokens, size) + strength * rows / rows.square().sum(1, keepdim=True), weight))
    return sides[0], sides[1], targets


def gradients(side: Side, targets: Tensor, old: Tensor, gap: Tensor) -> tuple[Tensor, Tensor]:
    """Of IW-OPD's loss by hidden states and output matrix."""
    hidden, weight = side.hidden.clone().requires_grad_(), side.weight.clone().requires_grad_()
    mask = torch.ones_like(targets, dtype=torch.bool)
    evidence = Evidence((old + gap)[None], old[None], mask[None], progress=0.0)
    weights = make_objective({"weights": "cumulative-share"}).signal(evidence).advantages[0]
    out = algo.fused_policy_loss(hidden, weight, targets, old, weights, mask, denominator=len(targets))
    by_hidden, by_matrix = torch.autograd.grad(out.loss, (hidden, weight))
    return by_hidden, by_matrix


def row(name: str, student: Tensor, gap: Tensor, exact: tuple[Tensor, Tensor], errors: list[str]) -> str:
    lp, exact_gap = (student - exact[0]).abs(), (gap - exact[1]).abs()
    share = float(exact_gap.mean() / exact[1].abs().mean())
    numbers = [f"{float(lp.mean()):.1e}", f"{float(lp.max()):.1e}", f"{float(exact_gap.mean()):.1e}", f"{100 * share:.3f} %"]
    return " | ".join([f"| {name}", *numbers, *errors]) + " |"


def measure(student: Side, teacher: Side, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Print a row for every rounding; returns the exact log-probs and gaps."""
    print("| head | mean abs. diff. of lp | max | mean noise of the gap | of mean abs. gap | grad by hidden | by matrix |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    exact = student.double().logprobs(targets)
    gap = teacher.double().logprobs(targets) - exact
    reference = gradients(student.double(), targets, exact, gap)
    for name, rounding in ROUNDINGS.items():
        with rounded(rounding):
            ours, theirs = student.logprobs(targets).double(), teacher.logprobs(targets).double()
            found = gradients(student, targets, exact.float(), gap.float())
        errors = [f"{float((one - two).norm() / two.norm()):.1e}" for one, two in zip(found, reference, strict=True)]
        print(row(name, ours, theirs - ours, (exact, gap), errors), flush=True)
    return exact, gap


def real_pair(folder: Path, tokens: int) -> None:
    """A student's own answers, scored by both models of a folder."""
    tokenizer = load_tokenizer(folder / "teacher")
    models = {name: load_model(folder / name).eval() for name in ("student", "teacher")}
    prompts = [Prompt(str(n), tuple(tokenizer(text)["input_ids"])) for n, text in enumerate(QUESTIONS)]
    settings = SamplingSettings(tokens, stop_ids=stop_ids(tokenizer, models["student"]))
    rollouts = LocalSampler(models["student"], settings, vocab_size=len(tokenizer)).sample(prompts, seed=0, step=0)
    sequences = Sequences.from_rollouts(rollouts)
    targets = sequences.response_ids
    student, teacher = (_states(model, sequences) for model in models.values())
    about = f"{folder}: {len(targets)} tokens, vocabulary {len(student.weight):,}, hidden size {student.weight.shape[1]}"
    print(f"\n{about}, mean abs. gap", end=" ")
    print(f"{float((teacher.logprobs(targets) - student.logprobs(targets)).abs().mean()):.2f}\n")
    exact = measure(student, teacher, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        halves = [_states(model, sequences) for model in models.values()]
    ours, theirs = (side.logprobs(targets).double() for side in halves)
    print(row("float32, both bodies under bf16 autocast", ours, theirs - ours, exact, ["", ""]))


@torch.no_grad()
def _states(model: Any, sequences: Sequences) -> Side:
    lm = ResponseModel(model)
    return Side(lm.token_hidden(sequences).float(), lm.head[0].detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64, help="made-up tokens; longest answer of a pair")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--pair", type=Path, help="folder with the models `student` and `teacher`")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"made up: {options.tokens} tokens, vocabulary {options.vocab:,}, hidden size {options.hidden}\n")
    measure(*made_up(options.tokens, options.vocab, options.hidden))
    if options.pair is not None:
        real_pair(options.pair, options.tokens)


if __name__ == "__main__":
    main()
