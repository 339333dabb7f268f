"""Time and memory of divergences from hidden states of student and teacher, at a real vocabulary. CPU, float32.

    python bench/divergence.py                # about 15 minutes on two idle cores
    python bench/divergence.py --quick        # 256 tokens: a look, without bars
    python bench/divergence.py --cpu-time     # on a machine that others use too: CPU seconds at one thread

Every case runs forward and backward to the student's hidden states and output matrix, in a process of its own, `--rounds`
times in alternation; the best counts. Extra memory: peak resident size minus the size with inputs in place, minus the
gradients that every method must hand back ([T, H] and [V, H]).
  naive             log_softmax of both models' logits, the divergence written out, autograd
  token_divergence  ours, a value for each token; the backward pass makes the logits again: six matrix products
  fused             ours, the weighted mean, with gradients from the forward pass: four
  top-k             the same over 64 ids that the teacher has sent, and the rest: three

Exit code 1 if a bar is missed: for each divergence at most 1/20 of naive's memory and 1.15 of its time, at 2,048 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from logprobs import peak_mb

METHODS = ("naive", "token_divergence", "fused", "top-k")
KINDS = ("reverse-kl", "forward-kl", "jsd", "skew-reverse-kl", "skew-forward-kl")
MEMORY_BAR, TIME_BAR = 1 / 20, 1.15
BAR_TOKENS = 2048
TOP_K = 64


def written_out(kind: str, log_p: Any, log_q: Any) -> Any:
    """[T] as one writes it with torch's own functions, beta 0.5 and alpha 0.1."""
    import torch
    from torch.nn.functional import kl_div

    def kl(one: Any, other: Any) -> Any:
        return kl_div(other, one, reduction="none", log_target=True).sum(-1)

    def mixed(one: Any, other: Any, share: float) -> Any:
        return torch.logaddexp(one + torch.tensor(share).log(), other + torch.tensor(1 - share).log())

    if kind == "jsd":
        m = mixed(log_q, log_p, 0.5)
        return 0.5 * kl(log_q, m) + 0.5 * kl(log_p, m)
    one, other = (log_p, log_q) if "reverse" in kind else (log_q, log_p)
    return kl(one, mixed(one, other, 0.1) if kind.startswith("skew") else other)


def run_case(method: str, kind: str, args: argparse.Namespace) -> dict[str, float]:
    import torch

    from iwopd import algo

    tokens, vocab, size = args.tokens, args.vocab, args.hidden
    torch.manual_seed(0)
    # In-place initialisation: a temporary here would hide in the base what the method needs later.
    weight = torch.empty(vocab, size).normal_(std=0.03).requires_grad_()
    hidden = torch.empty(tokens, size).normal_().requires_grad_()
    teacher = (torch.empty(tokens, size).normal_(), torch.empty(vocab, size).normal_(std=0.03))
    weights, mask = torch.rand(tokens), torch.ones(tokens, dtype=torch.bool)
    options: dict[str, Any] = {"kind": algo.DivergenceKind(kind)}
    ids = torch.arange(TOP_K) + torch.randint(0, vocab - TOP_K, (tokens, 1))
    sent = (ids, torch.full((tokens, TOP_K), -8.0), torch.full((tokens,), -0.02))

    def compute() -> Any:
        if method == "naive":
            log_p = torch.log_softmax(hidden @ weight.t(), -1)
            log_q = torch.log_softmax(teacher[0] @ teacher[1].t(), -1)
            return (written_out(kind, log_p, log_q) * weights).sum() / tokens
        if method == "token_divergence":
            return (algo.token_divergence(hidden, weight, *teacher, **options) * weights).sum() / tokens
        if method == "fused":
            return algo.fused_divergence_loss(hidden, weight, *teacher, weights, mask, denominator=tokens, **options).loss
        return algo.fused_top_k_loss(hidden, weight, *sent, weights, mask, denominator=tokens, **options).loss

    torch.mm(torch.ones(64, 64), torch.ones(64, 64))  # start the thread pool
    clock = time.process_time if args.cpu_time else time.perf_counter
    base, start = peak_mb(), clock()
    loss = compute()
    loss.backward()
    seconds = clock() - start
    return {
        "seconds": seconds,
        "extra_mb": peak_mb() - base - (vocab + tokens) * size * 4 / 2**20,
        "value": float(loss.detach()),
    }


def in_process(method: str, kind: str, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--case", method, "--kinds", kind]
    command += [f"--{name}={getattr(args, name)}" for name in ("tokens", "vocab", "hidden")]
    command += ["--cpu-time"] if args.cpu_time else []
    threads = "1" if args.cpu_time else str(args.threads)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": threads})
    if done.returncode:
        sys.exit(f"case {method} of {kind} failed with exit code {done.returncode}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(kind: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The best of several rounds for every method, in alternation, beside naive."""
    rounds = [{method: in_process(method, kind, args) for method in args.methods} for _ in range(args.rounds)]
    rows = []
    for method in args.methods:
        best = {name: min(one[method][name] for one in rounds) for name in ("seconds", "extra_mb")}
        rows.append({"divergence": kind, "method": method, **best, "value": rounds[0][method]["value"]})
    naive = next(row for row in rows if row["method"] == "naive")
    for row in rows:
        row["time_ratio"], row["memory_ratio"] = (row[name] / naive[name] for name in ("seconds", "extra_mb"))
        if row["method"] != "top-k" and abs(row["value"] - naive["value"]) > 1e-4 * abs(naive["value"]):
            sys.exit(f"{row['method']} of {kind} is {row['value']}, naive {naive['value']}: not the same thing is measured")
    return rows


def check_bars(rows: list[dict[str, Any]]) -> bool:
    met = True
    for row in (row for row in rows if row["method"] == "fused"):
        for name, bar in (("memory_ratio", MEMORY_BAR), ("time_ratio", TIME_BAR)):
            fits, what = row[name] <= bar, name.replace("_ratio", "")
            met &= fits
            print(f"{'ok  ' if fits else 'MISS'} {row['divergence']}: {what} / naive's {row[name]:.3f} (bar {bar:.2f})")
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=BAR_TOKENS)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["reverse-kl", "jsd"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="naive is always among them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds at one thread")
    parser.add_argument("--quick", action="store_true", help="256 tokens, one round")
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    parser.add_argument("--case", choices=METHODS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run_case(args.case, args.kinds[0], args)))
        return
    if args.quick:
        args.tokens, args.rounds = 256, 1
    args.methods = tuple(dict.fromkeys(["naive", *args.methods]))

    clock = "CPU seconds, 1 thread" if args.cpu_time else f"{args.threads} threads"
    print(
        f"{args.tokens} tokens, vocabulary {args.vocab}, hidden {args.hidden} (both), float32, {clock}, best of {args.rounds}\n"
    )
    print("| divergence | method | seconds | extra MB | time / naive | memory / naive |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    rows: list[dict[str, Any]] = []
    for kind in args.kinds:
        for row in measure(kind, args):
            ratios = f"{row['time_ratio']:.2f} | {row['memory_ratio']:.3f}"
            print(f"| {kind} | {row['method']} | {row['seconds']:.2f} | {row['extra_mb']:.0f} | {ratios} |", flush=True)
            rows.append(row)
    if args.json:
        sizes = {"tokens": args.tokens, "vocab": args.vocab, "hidden": args.hidden, "cpu_time": args.cpu_time}
        Path(args.json).write_text(json.dumps({**sizes, "rows": rows}, indent=1))
    print()
    sys.exit(0 if args.tokens < BAR_TOKENS or check_bars(rows) else 1)


if __name__ == "__main__":
    main()
