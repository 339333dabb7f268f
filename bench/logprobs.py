"""Time and memory of log-probs and policy loss from hidden states, at a real vocabulary. CPU, float32.

    python bench/logprobs.py                  # the table of docs/performance.md, about 10 minutes on two cores
    python bench/logprobs.py --tokens 512     # a quick look

Each case runs in a process of its own. Time: the best of `--repeats` (one run above T 2048, and for torch's default
chunking). Extra memory: peak resident size minus the size with inputs in place, minus the gradients that every method must
hand back ([T, H] and [V, H]). The naive method makes [V, H] after its peak, so this counts against ours, if against any.

Training cases run forward and backward to hidden states and output matrix:
  naive         log_softmax(hidden @ weight.T), gather, policy_loss
  torch         torch.nn.functional.linear_cross_entropy in place of log_softmax and gather, default chunking
  torch-rows    the same with the rows a chunk that we use
  token_logprobs, fused     ours
Scoring cases run forward only:
  bare          hidden @ weight.T and logsumexp, nothing else
  scoring       algo.token_logprobs without gradients

Exit code 1 if a bar is missed: at T = 2048 fused memory at most 1/30 of naive and time at most 1.1x naive; fused memory
at the largest T within 20 % of that at 2048; scoring at most 1.1x bare.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from typing import Any

TRAINING = ("naive", "torch", "torch-rows", "token_logprobs", "fused")
SCORING = ("bare", "scoring")


def peak_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def run_case(method: str, tokens: int, vocab: int, hidden_size: int, repeats: int) -> dict[str, float]:
    import torch

    from iwopd import algo
    from iwopd.algo.head import CHUNK_ELEMENTS_CPU

    training = method in TRAINING
    torch.manual_seed(0)
    # In-place initialisation: a temporary here would hide in the base what the method needs later.
    # Small weights: log-probs near -log V, so that no ratio reaches the clip. A clipped token has no gradient, and
    # `token_logprobs` leaves such tokens out of its backward pass, which would flatter it.
    weight = torch.empty(vocab, hidden_size).normal_(std=0.001).requires_grad_(training)
    hidden = torch.empty(tokens, hidden_size).normal_().requires_grad_(training)
    targets = torch.randint(0, vocab, (tokens,))
    old = torch.full((tokens,), -math.log(vocab))
    advantages = torch.randn(tokens)
    mask = torch.ones(tokens, dtype=torch.bool)

    def from_logprobs(logprobs: torch.Tensor) -> torch.Tensor:
        return algo.policy_loss(logprobs, old, advantages, mask, denominator=tokens).loss

    def cross_entropy(**options: Any) -> torch.Tensor:
        chosen = torch.nn.LinearCrossEntropyOptions(**options)
        return torch.nn.functional.linear_cross_entropy(hidden, weight, targets, reduction="none", options=chosen)

    def compute() -> torch.Tensor:
        if method == "naive":
            logprobs = torch.log_softmax(hidden @ weight.t(), -1).gather(-1, targets[:, None]).squeeze(-1)
            return from_logprobs(logprobs)
        if method == "torch":
            return from_logprobs(-cross_entropy())
        if method == "torch-rows":
            rows = min(tokens, CHUNK_ELEMENTS_CPU // vocab)
            return from_logprobs(-cross_entropy(batch_chunk_size=rows, chunking_method=None))
        if method == "token_logprobs":
            return from_logprobs(algo.token_logprobs(hidden, weight, targets))
        if method == "fused":
            return algo.fused_policy_loss(hidden, weight, targets, old, advantages, mask, denominator=tokens).loss
        if method == "bare":
            return torch.logsumexp(hidden @ weight.t(), -1)
        return algo.token_logprobs(hidden, weight, targets)

    torch.mm(torch.ones(64, 64), torch.ones(64, 64))  # start the thread pool
    base = peak_mb()
    seconds = []
    value = 0.0
    for _ in range(repeats):
        weight.grad = hidden.grad = None
        start = time.perf_counter()
        result = compute()
        if training:
            result.backward()
        seconds.append(time.perf_counter() - start)
        value = float(result.detach().sum())
        del result
    gradients = (vocab + tokens) * hidden_size * 4 / 2**20 if training else 0.0
    return {"seconds": min(seconds), "extra_mb": peak_mb() - base - gradients, "value": value}


def in_process(method: str, tokens: int, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--case", method, "--tokens", str(tokens)]
    repeats = 1 if tokens > 2048 or method == "torch" else args.repeats  # the slow ones
    command += ["--vocab", str(args.vocab), "--hidden", str(args.hidden), "--repeats", str(repeats)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": str(args.threads)})
    if done.returncode:
        sys.exit(f"case {method} at T {tokens} failed with exit code {done.returncode}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def check_bars(results: dict[tuple[str, int], dict[str, float]], lengths: list[int]) -> bool:
    bars: list[tuple[str, float, float]] = []
    if 2048 in lengths:
        fused, naive = results["fused", 2048], results["naive", 2048]
        bars.append(("fused memory / naive memory at T 2048", fused["extra_mb"] / naive["extra_mb"], 1 / 30))
        bars.append(("fused time / naive time at T 2048", fused["seconds"] / naive["seconds"], 1.1))
        ratio = results["scoring", 2048]["seconds"] / results["bare", 2048]["seconds"]
        bars.append(("scoring time / bare time at T 2048", ratio, 1.1))
        if max(lengths) > 2048:
            longest = results["fused", max(lengths)]["extra_mb"]
            bars.append((f"fused memory at T {max(lengths)} / at T 2048", longest / fused["extra_mb"], 1.2))
    for name, value, bar in bars:
        print(f"{'ok  ' if value <= bar else 'MISS'} {name}: {value:.3f} (bar {bar:.3f})")
    return all(value <= bar for _, value, bar in bars)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--case", choices=TRAINING + SCORING, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run_case(args.case, args.tokens[0], args.vocab, args.hidden, args.repeats)))
        return

    print(f"vocabulary {args.vocab}, hidden {args.hidden}, float32, {args.threads} threads, best of {args.repeats}\n")
    print("| T | method | seconds | extra MB | time / naive | memory / naive |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    results: dict[tuple[str, int], dict[str, float]] = {}
    for tokens in args.tokens:
        for method in TRAINING + SCORING:
            row = results[method, tokens] = in_process(method, tokens, args)
            base = results["bare" if method in SCORING else "naive", tokens]
            ratios = f"{row['seconds'] / base['seconds']:.2f} | {row['extra_mb'] / base['extra_mb']:.3f}"
            name = f"{method} (forward only)" if method in SCORING else method
            print(f"| {tokens} | {name} | {row['seconds']:.2f} | {row['extra_mb']:.0f} | {ratios} |", flush=True)
    print("\nIn the two forward-only rows the ratios are to `bare`.\n")
    sys.exit(0 if check_bars(results, args.tokens) else 1)


if __name__ == "__main__":
    main()
