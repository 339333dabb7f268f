"""One whole training step, ours and TRL's IWOPDTrainer: same random models, shapes and forced response lengths. CPU, float32.

    python bench/step.py --trl-python PATH      # an environment with trl 1.16 and transformers 5.22
    python bench/step.py                        # ours alone (unless IWOPD_TRL_PYTHON is set); says what it skips
    python bench/step.py --cpu-time --rounds 3  # on a machine that others use too: CPU seconds at one thread, in alternation

Student 256 wide with 4 layers, teacher 512 with 6, vocabulary 2,048 (responses of varied length, 4:1) or 151,936 (all of
full length). Lengths are forced in both: ours by a limit for each prompt, TRL's by allowing nothing but the end-of-sequence
token at a row's last position and forbidding it before. TRL runs with one micro-batch a step, which suits it best. Time: the
median of the steps after the first. Memory: peak resident size minus the size with models loaded.

Then, ours alone: the share of a step spent on advantages and weights, and the time per token of head, loss, advantages and
weights at response lengths 256 and 2,048.

Exit code 1 if a bar is missed: at least 2x TRL's tokens per second at vocabulary 2,048, at most 1/4 of its memory at 151,936
with 1,024 tokens, advantages and weights under 1 % of the step, time per token within 25 %.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CASES = {
    "2k 16x128": {"vocab": 2048, "batch": 16, "length": 128, "varied": True, "steps": 9},
    "2k 16x512": {"vocab": 2048, "batch": 16, "length": 512, "varied": True, "steps": 3},
    "152k 4x256": {"vocab": 151_936, "batch": 4, "length": 256, "varied": False, "steps": 3},
    "152k 2x1024": {"vocab": 151_936, "batch": 2, "length": 1024, "varied": False, "steps": 2},
}
PROMPT_TOKENS = 32
EOS = 2
clock = time.perf_counter
"""Replaced by the CPU's clock under `--cpu-time`."""


def lengths_of(case: dict[str, Any]) -> list[int]:
    """Response lengths of a step: equal, or evenly spread from a quarter of the longest to the longest."""
    if not case["varied"]:
        return [case["length"]] * case["batch"]
    low = case["length"] // 4
    return [low + (case["length"] - low) * row // (case["batch"] - 1) for row in range(case["batch"])]


def make_model(width: int, layers: int, vocab: int) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(width)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 128),
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    return Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]


def memory_mb(peak: bool) -> float:
    if peak:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def run_ours(case: dict[str, Any]) -> dict[str, float]:
    import torch

    from iwopd.algo.objectives import make_objective
    from iwopd.config import Optim
    from iwopd.lm import ResponseModel
    from iwopd.rollout.local import LocalSampler
    from iwopd.rollout.sampling import SamplingSettings
    from iwopd.teacher.local import LocalScorer
    from iwopd.train.learner import Learner
    from iwopd.train.ranks import Ranks
    from iwopd.train.scoring import evidence_of, loss_columns
    from iwopd.types import Prompt, ScoredRollout, TokenBatch

    student, teacher = make_model(256, 4, case["vocab"]), make_model(512, 6, case["vocab"])
    lengths = lengths_of(case)
    sampler = LocalSampler(student, SamplingSettings(max(lengths)))
    old_scorer, teacher_scorer = LocalScorer(student), LocalScorer(teacher.eval())
    objective = make_objective({"weights": "cumulative-share"})
    learner = Learner(ResponseModel(student), Optim(), objective, Ranks())
    generator = torch.Generator().manual_seed(0)
    base = memory_mb(peak=False)
    seconds, shares = [], []
    for step in range(case["steps"]):
        ids = torch.randint(6, case["vocab"], (case["batch"], PROMPT_TOKENS), generator=generator).tolist()
        prompts = [Prompt(f"{step}/{row}", tuple(row_ids)) for row, row_ids in enumerate(ids)]
        start = clock()
        rollouts = sampler.sample(prompts, seed=0, step=step, max_tokens=lengths)
        forward = learner.forward(rollouts)
        old = old_scorer.score(rollouts) if forward is None else [one.logprobs for one in forward.scores]
        scores = teacher_scorer.score(rollouts)
        batch = TokenBatch.collate([ScoredRollout(*items) for items in zip(rollouts, old, scores, strict=True)])
        before = clock()
        columns = loss_columns(objective, batch, evidence_of(batch))
        after = clock()
        learner.update(batch, columns, seed=0, step=step, forward=forward)
        seconds.append(clock() - start)
        shares.append((after - before) / seconds[-1])
    return {
        "seconds": statistics.median(seconds[1:]),
        "tokens_per_second": sum(lengths) / statistics.median(seconds[1:]),
        "extra_mb": memory_mb(peak=True) - base,
        "signal_share": statistics.median(shares[1:]),
    }


def run_trl(case: dict[str, Any]) -> dict[str, float]:
    """The same step in TRL. Runs in TRL's environment, without this package."""
    import random

    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoModelForCausalLM,
        LogitsProcessor,
        LogitsProcessorList,
        PreTrainedTokenizerFast,
        TrainerCallback,
    )
    from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

    words = ["<pad>", "<user>", "<eos>", "<unk>", "<assistant>", "<end>", *(f"w{i}" for i in range(case["vocab"] - 6))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = (
        "{% for m in messages %}<user> {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=template
    )
    rng = random.Random(0)

    def text(count: int) -> str:
        return " ".join(f"w{rng.randrange(case['vocab'] - 6)}" for _ in range(count))

    rows = [
        {"messages": [{"role": "user", "content": text(PROMPT_TOKENS - 2)}, {"role": "assistant", "content": text(16)}]}
        for _ in range(case["batch"] * (case["steps"] + 1))
    ]
    folder = tempfile.mkdtemp()  # TRL looks for the folder that a model came from
    loaded = []
    for name, width, layers in (("student", 256, 4), ("teacher", 512, 6)):
        make_model(width, layers, case["vocab"]).save_pretrained(f"{folder}/{name}")
        tokenizer.save_pretrained(f"{folder}/{name}")
        loaded.append(AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", dtype=torch.float32))
    student: Any
    student, teacher = loaded
    lengths = torch.tensor(lengths_of(case))

    class ForceLengths(LogitsProcessor):
        start: int | None = None

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            self.start = input_ids.shape[1] if self.start is None else self.start
            last = lengths == input_ids.shape[1] - self.start + 1
            scores[:, EOS] = torch.where(last, scores[:, EOS], -torch.inf)
            scores[last, :EOS] = -torch.inf
            scores[last, EOS + 1 :] = -torch.inf
            return scores

    generate = student.generate

    def forced(*arguments: Any, **options: Any) -> Any:
        return generate(*arguments, **options, logits_processor=LogitsProcessorList([ForceLengths()]))

    student.generate = forced
    settings = IWOPDConfig(
        output_dir=f"{folder}/run",
        per_device_train_batch_size=case["batch"],
        gradient_accumulation_steps=1,
        max_steps=case["steps"],
        max_length=case["length"] + PROMPT_TOKENS + 64,
        max_completion_length=case["length"],
        max_prompt_length=PROMPT_TOKENS + 64,
        learning_rate=1e-5,
        top_p=1.0,
        temperature=1.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        logging_steps=1000,
    )
    marks: list[float] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, *arguments: Any, **options: Any) -> None:
            marks.append(clock())

        def on_step_end(self, *arguments: Any, **options: Any) -> None:
            marks.append(clock())

    trainer = IWOPDTrainer(
        model=student,
        teacher_model=teacher,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Watch()],
    )
    trained: list[int] = []
    loss = trainer._compute_iw_opd_loss

    def counted(*arguments: Any, **options: Any) -> Any:
        trained.append(int((options["labels"] != -100).sum()))
        return loss(*arguments, **options)

    trainer._compute_iw_opd_loss = counted
    base = memory_mb(peak=False)
    trainer.train()
    shutil.rmtree(folder, ignore_errors=True)
    if trained[-1] != int(lengths.sum()):
        sys.exit(f"TRL trained on {trained[-1]} tokens instead of {int(lengths.sum())}: the comparison would be void")
    seconds = statistics.median(b - a for a, b in itertools.pairwise(marks[1:]))
    return {
        "seconds": seconds,
        "tokens_per_second": int(lengths.sum()) / seconds,
        "extra_mb": memory_mb(peak=True) - base,
    }


def run_flatness(length: int) -> dict[str, float]:
    """Seconds per token of head, loss, advantages and weights at a response length, vocabulary 151,936."""
    import torch

    from iwopd import algo

    vocab, width, rows = 151_936, 256, 2
    weight = torch.empty(vocab, width).normal_(std=0.02).requires_grad_()
    hidden = torch.empty(rows, length, width).normal_().requires_grad_()
    targets = torch.randint(0, vocab, (rows, length))
    teacher, old = -torch.rand(rows, length) * 12, -torch.rand(rows, length) * 12
    mask = torch.ones(rows, length, dtype=torch.bool)
    seconds = []
    for _ in range(4):
        weight.grad = hidden.grad = None
        start = clock()
        gap = algo.opd_advantages(teacher, old, mask)
        weights = algo.token_weights("cumulative-share", gap, mask)
        out = algo.fused_policy_loss(hidden, weight, targets, old, gap * weights, mask, denominator=rows * length)
        out.loss.backward()
        seconds.append(clock() - start)
    return {"per_token": min(seconds[1:]) / (rows * length)}


def child(python: str, which: str, name: str, threads: int, cpu_time: bool) -> dict[str, float]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    words = [python, __file__, "--child", which, "--case", name, *(["--cpu-time"] if cpu_time else [])]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{which} failed on {name}:\n{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=os.environ.get("IWOPD_TRL_PYTHON"), help="python of an environment with TRL")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cpu-time", action="store_true", help="compare CPU seconds, at one thread")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each case, ours and TRL's in turn; medians count")
    parser.add_argument("--child", choices=("ours", "trl", "flat"), help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cpu_time:
        global clock
        clock, args.threads = time.process_time, 1
    if args.child:
        run = {"ours": run_ours, "trl": run_trl}.get(args.child)
        print(json.dumps(run(CASES[args.case]) if run else run_flatness(int(args.case))))
        return

    bars: list[tuple[str, float, str, float]] = []
    if not args.trl_python:
        print("TRL is not compared: give the python of its environment with --trl-python or IWOPD_TRL_PYTHON\n")
    print("| case | who | step s | tokens/s | extra MB |\n| --- | --- | --- | --- | --- |", flush=True)
    for name in args.cases:
        pythons = {"ours": sys.executable, **({"trl": args.trl_python} if args.trl_python else {})}
        runs: dict[str, list[dict[str, float]]] = {who: [] for who in pythons}
        for _ in range(args.rounds):
            for who, python in pythons.items():
                runs[who].append(child(python, who, name, args.threads, args.cpu_time))
        results = {who: medians(rows) for who, rows in runs.items()}
        for who, row in results.items():
            print(
                f"| {name} | {who} | {row['seconds']:.2f} | {row['tokens_per_second']:.0f} | {row['extra_mb']:.0f} |",
                flush=True,
            )
        bars.append((f"{name}: share of advantages and weights", results["ours"]["signal_share"], "<=", 0.01))
        if "trl" in results:
            speed = results["ours"]["tokens_per_second"] / results["trl"]["tokens_per_second"]
            memory = results["ours"]["extra_mb"] / results["trl"]["extra_mb"]
            if CASES[name]["vocab"] == 2048:
                bars.append((f"{name}: tokens per second against TRL", speed, ">=", 2.0))
            elif CASES[name]["length"] == 1024:
                bars.append((f"{name}: memory against TRL", memory, "<=", 0.25))
            print(f"| {name} | ours / TRL | | {speed:.2f} | {memory:.3f} |", flush=True)
    short, long = (
        child(sys.executable, "flat", str(length), args.threads, args.cpu_time)["per_token"] for length in (256, 2048)
    )
    print(f"\nhead, loss, advantages and weights: {1e6 * short:.0f} us a token at length 256, {1e6 * long:.0f} at 2048\n")
    bars.append(("time per token at 2048 / at 256", long / short, "<=", 1.25))
    met = [value <= bar if sign == "<=" else value >= bar for _, value, sign, bar in bars]
    for (name, value, sign, bar), ok in zip(bars, met, strict=True):
        print(f"{'ok  ' if ok else 'MISS'} {name}: {value:.4g} (bar {sign} {bar})")
    sys.exit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
