"""What a teacher server's answers cost on the wire, and what 16 bits do to a KL of whole distributions: a minute or two.

    python bench/wire.py                                   # vocabulary 151,936, hidden size 1,024, made-up states

Bytes are those of one token of an answer. Those of `iwopd serve-teacher` follow from the format (`teacher.wire.answer_bytes`,
which tests hold against real answers); those of JSON are counted in answers with made-up ids and log-probs. vLLM's are written
as it writes them, texts of four letters included; a prompt's tokens are answered, too, which is not counted here.

For the error, a teacher's states are rounded and multiplied with its output matrix in float32. The reference is float64. States
of a teacher that computes in 16 bits travel as they are: no error.
"""

from __future__ import annotations

import argparse
import json
import random

import torch
from head_precision import Side, made_up
from torch import Tensor

from iwopd import algo
from iwopd.algo.views import TokenScores, Wanted
from iwopd.teacher.questions import TokenSequence
from iwopd.teacher.serving import completion
from iwopd.teacher.serving_model import Scored
from iwopd.teacher.wire import answer_bytes

TOKENS = 1000
VOCAB = 151_936


def json_bytes(k: int = 0) -> float:
    """Of one token in JSON: log-probs as our server writes them, with k likeliest ids as vLLM does."""
    rng = random.Random(0)
    ids = tuple(rng.randrange(VOCAB) for _ in range(TOKENS + 1))
    answer = completion("m", [TokenSequence(ids, 1)], Scored([TokenScores(-5 * torch.rand(TOKENS))], []))
    entries = answer["choices"][0]["prompt_logprobs"]
    for entry in entries[1:] if k else []:
        own = next(iter(entry.values()))
        own |= {"rank": rng.randrange(1, 1000), "decoded_token": "text"}
        for rank in range(1, k + 1):
            likely = {"logprob": float(-5 * torch.rand(1)), "rank": rank, "decoded_token": "text"}
            entry[str(rng.randrange(VOCAB))] = likely
    return len(json.dumps(answer, separators=(",", ":"))) / TOKENS


def print_bytes() -> None:
    rows: list[tuple[str, float, int]] = [
        ("log-probs, JSON (`vllm`)", json_bytes(), 0),
        ("20 likeliest ids, JSON (`vllm`)", json_bytes(20), 0),
        ("64 likeliest ids, JSON (`vllm --max-logprobs 64`)", json_bytes(64), 0),
        ("log-probs", answer_bytes(Wanted()), 0),
        ("entropy", answer_bytes(Wanted(entropy=True)), 0),
        ("64 likeliest ids and the rest", answer_bytes(Wanted(top_k=64)), 0),
        ("64 chosen ids and the rest", answer_bytes(Wanted(chosen=True), chosen=64), 4 * 64),
    ]
    for size in (1024, 2560, 4096):
        rows.append((f"hidden states of size {size:,}, 16 bits", answer_bytes(Wanted(states=True), hidden=size), 0))
    rows.append(("all log-probs of 151,936 ids in float32, for comparison", 4 * VOCAB, 0))
    print("| answer | bytes per token | in the request |\n| --- | --- | --- |")
    for name, count, asked in rows:
        print(f"| {name} | {round(count):,} | {asked + 4 if 'JSON' not in name else 7} |")
    for size, name in ((1024, "float32"), (2560, "bfloat16"), (4096, "bfloat16")):
        item = getattr(torch, name).itemsize
        print(f"output matrix of {VOCAB:,} ids at size {size:,} in {name}, once: {VOCAB * size * item / 2**20:,.0f} MiB")


def kl(student: Side, teacher: Side) -> Tensor:
    with torch.no_grad():
        return algo.token_kl(student.hidden, student.weight, teacher.hidden, teacher.weight).double()


def print_errors(tokens: int, hidden: int) -> None:
    student, teacher, targets = made_up(tokens, VOCAB, hidden)
    exact, logprobs = kl(student.double(), teacher.double()), teacher.double().logprobs(targets)
    print(f"\nmade up: {tokens} tokens, vocabulary {VOCAB:,}, hidden size {hidden:,}, mean KL {float(exact.mean()):.2f}\n")
    print("| states | KL: mean abs. error | max | mean relative error | log-probs: max abs. error |")
    print("| --- | --- | --- | --- | --- |")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        sent = Side(teacher.hidden.to(dtype).float(), teacher.weight)
        error = (kl(student, sent) - exact).abs()
        wrong = (sent.logprobs(targets).double() - logprobs).abs()
        relative = float((error / exact).mean())
        name = str(dtype).removeprefix("torch.")
        print(f"| {name} | {float(error.mean()):.1e} | {float(error.max()):.1e} | {relative:.1e} | {float(wrong.max()):.1e} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64, help="made-up tokens")
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print_bytes()
    for hidden in options.hidden:
        print_errors(options.tokens, hidden)


if __name__ == "__main__":
    main()
