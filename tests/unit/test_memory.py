"""Memory of the output head at a real vocabulary, measured from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

MEMORY = """
import json, os, pathlib, re, sys, torch
from iwopd import algo
def peak():  # KB; not ru_maxrss, where a new process inherits what its parent had
    return int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
for case in json.loads(sys.argv[1]):  # a process for each: the first one has nothing but the imports
    if (child := os.fork()) == 0:
        break
    assert os.waitpid(child, 0)[1] == 0, case
else:
    sys.exit()
method, hidden_size, train_weight = case[0], case[1], case[2] == "train"
torch.set_num_threads(1)
T, V = 1536, 151_936
weight = torch.empty(V, hidden_size).normal_(std=0.02).requires_grad_(train_weight)
hidden = torch.empty(T, hidden_size).normal_().requires_grad_()
targets = torch.randint(0, V, (T,))
teacher = torch.empty(T, hidden_size).normal_() if method == "kl" or "divergence" in method else None
torch.mm(torch.ones(64, 64), torch.ones(64, 64))
base = peak()
if method == "naive":
    out = torch.log_softmax(hidden @ weight.t(), -1).gather(-1, targets[:, None])
elif method == "ours":
    out = algo.token_logprobs(hidden, weight, targets)
elif method == "entropy":
    out = algo.token_entropy(hidden, weight)
elif method == "kl":
    out = algo.token_kl(hidden, weight, teacher, weight)
elif method == "fused":
    zeros, mask = torch.zeros(T), torch.ones(T, dtype=torch.bool)
    out = algo.fused_policy_loss(hidden, weight, targets, zeros - 12, zeros + 1, mask, denominator=T).loss
elif method == "naive divergence":
    log_p, log_q = (torch.log_softmax(one @ weight.t(), -1) for one in (hidden, teacher))
    out = torch.nn.functional.kl_div(log_q.detach(), log_p, reduction="none", log_target=True).sum(-1)
elif method == "divergence":
    weights, mask = torch.ones(T), torch.ones(T, dtype=torch.bool)
    kind = algo.DivergenceKind("jsd")
    out = algo.fused_divergence_loss(hidden, weight, teacher, weight, weights, mask, kind=kind, denominator=T).loss
elif method == "top-k":
    weights, mask = torch.ones(T), torch.ones(T, dtype=torch.bool)
    ids, rest, kind = torch.arange(64).expand(T, 64), torch.full((T,), -1.0), algo.DivergenceKind("jsd")
    given = (ids, torch.full((T, 64), -5.0), rest, weights, mask)
    out = algo.fused_top_k_loss(hidden, weight, *given, kind=kind, denominator=T).loss
out.sum().backward()
returned = sum(t.grad.numel() * 4 for t in (weight, hidden) if t.grad is not None)
print(json.dumps((peak() - base) / 1024 - returned / 2**20), flush=True)
"""


def extra_memory(*cases: tuple[str, int, str]) -> list[float]:
    """MB above inputs and returned gradients, for each method, hidden size and weight in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEMORY, json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [float(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak resident size from /proc")
@pytest.mark.parametrize("hidden_size", [32, 256])  # a second output matrix of the larger would be seen
def test_memory_is_a_twentieth_of_naive_at_a_real_vocabulary(hidden_size: int) -> None:
    """T 1536, V 151,936, forward and backward; whatever the hidden size is, and with a frozen output matrix too."""
    methods = ("ours", "fused", "entropy", "kl", "top-k")
    trained = [(method, hidden_size, "train") for method in ("naive", *methods)]
    frozen = [(method, hidden_size, "frozen") for method in ("naive", "ours")]
    naive, *others, naive_frozen, ours_frozen = extra_memory(*trained, *frozen)
    assert naive > 1500  # two to three [T, V] tensors of 890 MB, else the comparison is void
    assert hidden_size == 32 or hidden_size * 151_936 * 4 / 2**20 > naive / 20
    for method, memory in zip(methods, others, strict=True):
        assert memory < naive / 20, method
    assert ours_frozen < naive_frozen / 20


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak resident size from /proc")
def test_a_divergence_takes_a_twentieth_of_naives_memory_at_a_real_vocabulary() -> None:
    naive, ours = extra_memory(("naive divergence", 32, "train"), ("divergence", 32, "train"))
    assert naive > 3000
    assert ours < naive / 20
