"""Checks the arithmetic behind `iwopd plan` on this CPU, and prints the tables of docs/plan.md.

    python bench/plan.py               # all of it: half a minute, one thread
    python bench/plan.py --published   # only the comparison with published figures (no measuring)

Measured here: FLOPs of update, scores and decoding by torch's counter against the formula (they must be equal); memory of an
update by the process's resident size against `iwopd.train.memory` (5 % below to 45 % above it); and which share of the CPU's
own matrix-product rate and memory bandwidth the stages reach, for what it is worth. What only a GPU can show stays an
assumption, and is compared with what others published instead. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from iwopd.cluster.plan.gpus import GPUS, Gpu
from iwopd.cluster.plan.public_models import PublicShape, make_config, public_config
from iwopd.cluster.plan.rates import FAST, SLOW, TYPICAL, Rates
from iwopd.cluster.plan.rollouts import answer_lengths, decode_seconds, step_seconds
from iwopd.cluster.plan.work import all_flops, decode_bytes, decode_flops, forward_flops, update_flops
from iwopd.train.memory import UPDATE, DeviceMemory, ModelShape, Tokens, TrainedModel

LEAST, MOST = 0.95, 1.45
"""Predicted by measured memory. The parts that are added up do not all meet, so the sum is above what is ever in use."""
PROMPT, VOCABULARY = 32, 4096


def make_model(width: int, layers: int, experts: int = 0, attention: str = "sdpa") -> Any:
    """A random Qwen3; with experts, a Qwen3-MoE that sends a token to two of them.

    attention: `eager` makes attention and experts of plain matrix products, which torch's counter knows.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 64,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "attn_implementation": attention,
        "experts_implementation": "eager" if attention == "eager" else None,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    if not experts:
        return Qwen3ForCausalLM(Qwen3Config(**sizes))  # type: ignore[no-untyped-call]
    sizes |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": width // 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))  # type: ignore[no-untyped-call]


class Step:
    """The stages of a real step on given rollouts, each of which can be run by itself."""

    def __init__(self, model: Any, answers: list[int], checkpointing: bool = False) -> None:
        import torch

        from iwopd.algo.objectives import make_objective
        from iwopd.config import Optim
        from iwopd.lm import ResponseModel
        from iwopd.rollout.local import LocalSampler
        from iwopd.rollout.sampling import SamplingSettings
        from iwopd.teacher.local import LocalScorer
        from iwopd.train.learner import Learner
        from iwopd.train.ranks import Ranks
        from iwopd.types import Prompt, Rollout

        optim = Optim(gradient_checkpointing=checkpointing, token_budget=PROMPT + max(answers))
        self.model, self.answers = model, answers
        self.learner = Learner(ResponseModel(model), optim, make_objective({"weights": "cumulative-share"}), Ranks())
        self.scorer = LocalScorer(model, token_budget=PROMPT + max(answers))
        self.sampler = LocalSampler(model, SamplingSettings(max(answers)))
        generator = torch.Generator().manual_seed(0)

        def ids(count: int) -> Any:
            return torch.randint(6, model.config.vocab_size, (count,), generator=generator)

        self.prompts = [Prompt(f"p{row}", tuple(ids(PROMPT).tolist())) for row in range(len(answers))]
        self.rollouts = [
            Rollout(prompt, ids(count), torch.zeros(count), "length", 0)
            for prompt, count in zip(self.prompts, answers, strict=True)
        ]

    def score(self) -> Any:
        return self.scorer.score(self.rollouts)

    def update(self) -> None:
        import torch

        from iwopd.train.scoring import evidence_of, loss_columns
        from iwopd.types import ScoredRollout, TokenBatch

        old = [torch.full((count,), -2.0) for count in self.answers]
        teacher = [torch.full((count,), -1.0) for count in self.answers]
        batch = TokenBatch.collate([ScoredRollout(*items) for items in zip(self.rollouts, old, teacher, strict=True)])
        self.learner.update(batch, loss_columns(self.learner.objective, batch, evidence_of(batch)), seed=0, step=1)

    def write(self) -> Any:
        return self.sampler.sample(self.prompts, seed=0, step=0)


def counted_flops(work: Callable[[], Any]) -> int:
    """By torch's counter, and one more of its kind for a product in place, which it does not know."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    def in_place(out: Any, left: Any, right: Any, *_: Any, **__: Any) -> int:
        return int(2 * left[0] * left[1] * right[1])

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place}) as counter:
        work()
    return int(counter.get_total_flops())


def rotary_flops(model: ModelShape, tokens: int) -> int:
    """The angles of the positions: a product that torch counts and the formula leaves out (32 FLOPs a token here)."""
    return 2 * (int(model.config.head_dim) // 2) * tokens


def flops() -> Iterator[tuple[str, float, float]]:
    """Stage, FLOPs by the formula, FLOPs by torch's counter (which counts all of attention, not its causal half)."""
    answer = 96
    tokens = PROMPT + answer - 1  # nothing is predicted from the last one, so it is not read
    for name, experts in (("dense", 0), ("experts", 8)):
        for checkpointing in (False, True):
            step = Step(make_model(128, 3, experts, "eager"), [answer], checkpointing)
            model = ModelShape.of(step.model.config)
            again = ", recomputed" if checkpointing else ""
            formula = update_flops(model, tokens, answer, recompute=checkpointing, causal=False)
            if checkpointing and not experts:  # torch stops before a layer's last product, which nothing needs
                formula -= 2 * tokens * model.layers * step.model.config.hidden_size * step.model.config.intermediate_size
            # The local learner also splits the gradient in two (algo.agreement): a thousandth of a step, left out of the plan.
            formula += (4 * answer + 8) * step.model.config.hidden_size**2
            step.score()  # the first use of a model tries packing out
            step.update()
            yield f"update, {name}{again}", formula, counted_flops(step.update) - rotary_flops(model, tokens)
        formula = forward_flops(model, tokens, answer, causal=False)
        yield f"scores, {name}", formula, counted_flops(step.score) - rotary_flops(model, tokens)


def decoding_flops() -> tuple[float, float]:
    """Formula and count of one decoding step of 4 rows after 40 tokens, through the model's own forward."""
    import torch
    from transformers import DynamicCache

    transformer = make_model(128, 3, attention="eager").eval()
    model = ModelShape.of(transformer.config)
    cache = DynamicCache(config=transformer.config)
    ids = torch.randint(6, VOCABULARY, (4, 41))
    with torch.no_grad():
        transformer(input_ids=ids[:, :40], past_key_values=cache)
        counted = counted_flops(lambda: transformer(input_ids=ids[:, 40:], past_key_values=cache))
    return decode_flops(model, 4, 4 * 41), counted - rotary_flops(model, 1)


RETURNING = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc gives freed memory back at once: the resident size is then what is in use, not what was."""
MEMORY_CASES = [
    {"width": 256, "layers": 8, "answer": 2016, "checkpointing": False},
    {"width": 256, "layers": 8, "answer": 2016, "checkpointing": True},
    {"width": 640, "layers": 4, "answer": 480, "checkpointing": False},
]


def memory_of(case: dict[str, Any]) -> tuple[float, float]:
    """Bytes of an update beside the weights: predicted, and by which the process grew at its peak. Runs in its own process."""
    import torch

    torch.set_num_threads(1)
    step = Step(make_model(case["width"], case["layers"]), [case["answer"]], case["checkpointing"])
    Step(make_model(64, 1), [8]).update()  # what the first update of a process loads is not the step's
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # else the step would find room that making the model has left
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    for _ in range(2):  # Adam's moments are there from the second on
        step.update()
    # Not ru_maxrss: a new process inherits there what its parent had.
    (peak_kb,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    peak = int(peak_kb) * 1024
    student = TrainedModel(ModelShape.of(step.model.config), autocast=False, gradient_checkpointing=case["checkpointing"])
    memory = DeviceMemory(student=student, tokens=Tokens(update=PROMPT + case["answer"]), on_gpu=False).step
    return memory.needed(*UPDATE) - memory.state["weights"], peak - before


def memory() -> Iterator[tuple[str, float, float]]:
    for case in MEMORY_CASES:
        command = [sys.executable, __file__, "--memory", json.dumps(case)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **RETURNING})
        predicted, measured = json.loads(done.stdout)
        again = ", layers recomputed" if case["checkpointing"] else ""
        yield f"width {case['width']}, {case['layers']} layers, {case['answer'] + PROMPT} tokens{again}", predicted, measured


def shares() -> Iterator[tuple[str, float]]:
    """Stage and the share of this CPU's own best rate that it reaches, one thread."""
    import torch

    torch.set_num_threads(1)
    matrix = torch.randn(1536, 1536)
    best = 2 * 1536**3 / _fastest(lambda: matrix @ matrix)
    block = torch.randn(2**25)
    bandwidth = 4 * 2**25 / _fastest(lambda: block.sum())
    answers = [224, 160, 96, 64]
    step = Step(make_model(512, 6), answers)
    model = ModelShape.of(step.model.config)
    yield "update (FLOPs)", all_flops(model, PROMPT, answers, update=True) / _fastest(step.update, 2) / best
    yield "scores (FLOPs)", all_flops(model, PROMPT, answers) / _fastest(step.score, 2) / best
    rows, count = len(answers), max(answers)
    seconds = _fastest(step.write, 1)
    done = sum(decode_flops(model, rows, rows * (PROMPT + place)) for place in range(count))
    read = sum(decode_bytes(model, rows, rows * (PROMPT + place), 4, 4) for place in range(count))
    yield "rollouts of 4 rows (FLOPs)", done / seconds / best
    yield "rollouts of 4 rows (memory bandwidth)", read / seconds / bandwidth


def _fastest(work: Callable[[], Any], times: int = 3) -> float:
    def once() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return min(once() for _ in range(times))


# --- what others measured -------------------------------------------------------------------------------------------------

H100, A100 = GPUS["h100"], GPUS["a100-80"]
SHAPES = {
    "Qwen3-8B": PublicShape(hidden=4096, inner=12288, layers=36, heads=32, tied=False),
    "Qwen3-14B": PublicShape(hidden=5120, inner=17408, layers=40, heads=40, tied=False),
    "Qwen3-32B": PublicShape(hidden=5120, inner=25600, layers=64, heads=64, tied=False),
    "Llama-2-7B": PublicShape(hidden=4096, inner=11008, layers=32, heads=32, vocabulary=32000, key_heads=32, tied=False),
    "Llama-3.1-8B": PublicShape(hidden=4096, inner=14336, layers=32, heads=32, vocabulary=128256, tied=False),
}
"""Models of the measurements; a Llama differs from a Qwen3 of its shape by a few norms."""

DECODING = [
    # model, GPUs of an engine, rows, mean answer, median milliseconds between tokens
    ("Qwen3-8B", 1, 8, 7854, 9.70),
    ("Qwen3-8B", 1, 32, 8170, 16.87),
    ("Qwen3-8B", 1, 82, 8052, 27.88),
    ("Qwen3-8B", 1, 128, 641, 20.70),
    ("Qwen3-8B", 1, 474, 645, 47.16),
    ("Qwen3-30B-A3B", 1, 8, 8162, 12.31),
    ("Qwen3-30B-A3B", 1, 16, 8243, 16.75),
    ("Qwen3-30B-A3B", 1, 64, 919, 28.94),
    ("Qwen3-30B-A3B", 2, 128, 8058, 28.59),
    ("Qwen3-30B-A3B", 2, 1019, 920, 74.82),
    ("Qwen3-235B-A22B", 8, 32, 8955, 33.39),
]
"""ML.ENERGY leaderboard, vLLM on H100, bfloat16 (source 1)."""


def model_of(name: str) -> ModelShape:
    return ModelShape.of(make_config(SHAPES[name]) if name in SHAPES else public_config(name))


Row = tuple[str, str, str, float, Callable[[Rates], float]]
"""What, source, unit, published figure, and the plan's for given rates."""


def published() -> Iterator[Row]:
    for name, gpus, rows, answer, figure in DECODING:
        model, context = model_of(name), rows * (300 + answer / 2)  # prompts of 300 tokens are an assumption

        def milliseconds(
            rates: Rates, model: ModelShape = model, gpus: int = gpus, rows: int = rows, context: float = context
        ) -> float:
            return 1e3 * step_seconds(model, H100, rates, gpus, rows, context)

        yield f"decoding {name}, {gpus} H100, {rows} rows, answers of {answer}", "1", "ms a token", figure, milliseconds
    yield _training("Qwen3-30B-A3B", "3", 3075)
    yield _training("Llama-2-7B", "4", 9600)
    yield _scoring("Qwen3-14B", H100, 1, 32000, "5", 8298.56)
    yield _scoring("Qwen3-14B", H100, 1, 4000, "5", 9218.03)
    yield _scoring("Qwen3-235B-A22B", A100, 8, 32000, "6", 6657.49)
    yield _whole_step("Llama-3.1-8B", 16, 1, 2048, 1060, 97.7)
    yield _whole_step("Qwen3-32B", 32, 4, 2048, 3206, 393)
    yield _whole_step("Qwen3-30B-A3B", 32, 2, 2048, 3203, 192)


def _training(name: str, source: str, figure: float) -> Row:
    model = model_of(name)

    def rate(rates: Rates) -> float:
        reached = H100.flops * (rates.train_experts if model.count.experts else rates.train)
        return reached * 4096 / update_flops(model, 4096, 4096, recompute=False)

    return f"training {name}, H100, FSDP, 4,096 tokens", source, "tokens/s a GPU", figure, rate


def _scoring(name: str, gpu: Gpu, gpus: int, tokens: int, source: str, figure: float) -> Row:
    model = model_of(name)

    def rate(rates: Rates) -> float:
        reached = gpus * gpu.flops * (rates.score_experts if model.count.experts else rates.score)
        return reached * tokens / forward_flops(model, tokens, 1)

    kind = gpu.name.partition("-")[0].upper()
    return f"reading {name}, vLLM on {gpus} {kind}, prompts of {tokens:,}", source, "tokens/s", figure, rate


def _whole_step(name: str, gpus: int, shards: int, rollouts: int, tokens: int, figure: float) -> Row:
    """GRPO in NeMo RL: rollouts, old and reference log-probs, update, one after the other on all GPUs."""
    model, prompt = model_of(name), 128

    def seconds(rates: Rates) -> float:
        engines = gpus // shards
        lengths = answer_lengths(rollouts // engines, tokens - prompt, 4096 - prompt, everyone=rollouts)
        writing = decode_seconds(model, H100, rates, shards=shards, lengths=lengths, prompt=prompt, most_rows=len(lengths))
        reached = gpus * H100.flops * (rates.score_experts if model.count.experts else rates.train)  # it has expert parallelism
        computed = 2 * all_flops(model, prompt, lengths) + all_flops(model, prompt, lengths, update=True)
        return writing + engines * computed / reached + 2 * model.count.total / rates.sync

    return f"whole step, {name}, {gpus} H100, {rollouts} x {tokens:,} tokens", "7", "s", figure, seconds


def published_table() -> Iterator[str]:
    yield "| what | source | published | plan | low - high | plan / published |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for what, source, unit, figure, plan in published():
        ends = sorted((plan(FAST), plan(SLOW)))
        typical = plan(TYPICAL)
        cells = (
            f"{_round(figure)} {unit} | {_round(typical)} | {_round(ends[0])} - {_round(ends[1])} | {typical / figure:.2f} |"
        )
        yield f"| {what} | {source} | {cells}"


def _round(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--memory", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print(json.dumps(memory_of(options.memory)))
        return 0
    failed = False
    if not options.published:
        import torch

        torch.set_num_threads(1)
        print("FLOPs: formula, counted by torch")
        for name, formula, counted in [*flops(), ("decoding, dense", *decoding_flops())]:
            failed |= formula != counted
            print(f"  {name:<28}{formula:>16,.0f}{counted:>16,.0f}  {'equal' if formula == counted else 'DIFFERENT'}")
        print("memory of an update beside the weights, MB: predicted, measured")
        for name, predicted, measured in memory():
            failed |= not LEAST < predicted / measured < MOST
            print(f"  {name:<52}{predicted / 1e6:>8.0f}{measured / 1e6:>8.0f}  {predicted / measured:.2f}")
        print("share of this CPU's best rate, one thread")
        for name, share in shares():
            print(f"  {name:<40}{100 * share:>5.0f} %")
    print(*published_table(), sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
