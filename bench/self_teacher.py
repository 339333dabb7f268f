"""Privileged self-distillation on the embedded world's task: the student learns from itself, shown the answer.

A small model is trained for seconds on worked solutions of three-operand problems. After a plain prompt (`3+4*2?`) most of its
examples ignore the order of operations; after one with the answer (`3+4*2=1?`) all are right. So the model that is shown the
answer solves problems that it does not solve by itself. Then it is trained on its own answers to plain prompts of the training
split, and the teacher is itself with the answer in its prompt (teacher.user = "{prompt}={answer}").

    python bench/self_teacher.py --seeds 0 1 2

prints the accuracy on plain prompts of the evaluation split, before and after, by whose weights the teacher has. A seed decides
initialisation, data, the order of prompts and sampling. Intervals are Student's t over seeds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState

from iwopd.config import Config, make_config
from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.runs.directory import RunDirectory
from iwopd.tiny import build_tokenizer, task
from iwopd.tiny.architecture import ModelSize, new_model
from iwopd.tiny.pretrain import solution_loss
from iwopd.tiny.tokenizer import EOS
from iwopd.train.assembly import assemble
from iwopd.train.loop import take_step
from iwopd.types import Prompt

OPERANDS, SIZE = 3, ModelSize(48, 2)
PROBLEMS, SAMPLES = 160, 4
"""Of an evaluation."""
RIGHT = 0.3
"""Share of right solutions after plain prompts, in pretraining."""
VARIANTS: dict[str, dict[str, Any]] = {
    "live": {"teacher": {"source": "live"}},
    "ema": {"teacher": {"source": "ema"}, "ema": {"decay": 0.9}},
    "base": {"teacher": {"source": "base"}, "lora": {"rank": 16}},
}
T95 = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}
"""Student's t for 95 %, by the number of seeds."""


def asked(expression: str, *, hinted: bool) -> str:
    return f"{expression}={task.answer(expression)}" if hinted else expression


def pretrained(seed: int, steps: int = 300) -> Any:
    """A model that solves problems if it is shown the answer, and few of them if it is not."""
    ids_of, name = build_tokenizer().get_vocab(), f"self-teacher/{seed}"
    model, rng = new_model(SIZE, name), random.Random(name)
    stream = task.problems(OPERANDS, "train", rng)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    for step in range(steps):
        hinted, rows = step % 2 == 1, []
        for expression in islice(stream, 32):
            right = hinted or rng.random() < RIGHT
            solution = task.right_solution(expression) if right else task.left_to_right_solution(expression)
            body, box, end = solution.partition("\\boxed{")
            rows.append([ids_of[token] for token in (*asked(expression, hinted=hinted), "?", *body, box, *end, EOS)])
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 30, 1.05 - step / steps if step > 0.6 * steps else 1.0)
        ids = torch.tensor(rows)
        solution_loss(model, ids, ids[:, len(asked("1+1*1", hinted=hinted)) + 1 :]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.train(False)
    return model


def accuracy(model: Any, *, hinted: bool = False) -> float:
    """Share of right answers to problems of the evaluation split."""
    tokenizer = build_tokenizer()
    prompts = []
    for expression in task.distinct_problems(OPERANDS, "eval", random.Random("eval"), PROBLEMS):
        ids = tokenizer.encode(asked(expression, hinted=hinted) + "?", add_special_tokens=False)
        prompts.append(Prompt(expression, tuple(ids)))
    settings = SamplingSettings(task.response_tokens(OPERANDS) + 4, stop_ids={tokenizer.eos_token_id})
    rollouts = LocalSampler(model, settings).sample(prompts, seed=0, step=0, samples=SAMPLES)
    right = [task.check(rollout.prompt.id, str(tokenizer.decode(rollout.response_ids))) for rollout in rollouts]
    return sum(right) / len(right)


def recipe(folder: Path, model: Any, variant: str, seed: int, steps: int) -> Config:
    """The run of one variant; its files are written into `folder`."""
    model.save_pretrained(folder / "student")
    build_tokenizer().save_pretrained(folder / "student")
    problems = task.distinct_problems(OPERANDS, "train", random.Random(f"prompts/{seed}"), 512)
    lines = [json.dumps({"prompt": expression, "answer": task.answer(expression)}) for expression in problems]
    (folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    chosen = VARIANTS[variant]
    return make_config(
        {
            "seed": seed,
            "steps": steps,
            "threads": 1,
            "models": {"student": str(folder / "student")},
            "data": {"prompts": str(folder / "prompts.jsonl")},
            "rollout": {"prompts_per_step": 64, "max_tokens": task.response_tokens(OPERANDS) + 4},
            "optim": {"lr": 3e-3 if "lora" in chosen else 1e-4},
            "eval": {"prompts": 0},
            **chosen,
            "teacher": {**chosen["teacher"], "user": "{prompt}={answer}"},
        }
    )


def distilled(model: Any, variant: str, seed: int, steps: int, folder: Path) -> float:
    """Accuracy on plain prompts after so many steps."""
    config = recipe(folder, model, variant, seed, steps)
    try:
        with assemble(config, print) as parts:
            for step in range(1, steps + 1):
                take_step(config, parts, RunDirectory(folder / "run"), step)
            return accuracy(parts.student)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def interval(values: list[float]) -> str:
    """Mean and 95 % interval, in percent."""
    mean = statistics.mean(values)
    if len(values) not in T95:
        return f"{100 * mean:.1f}"
    half = T95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{100 * mean:.1f} ± {100 * half:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    for seed in options.seeds:
        model = pretrained(seed)
        found.setdefault("before, plain prompt", []).append(accuracy(model))
        found.setdefault("before, with the answer", []).append(accuracy(model, hinted=True))
        for variant in VARIANTS:
            with tempfile.TemporaryDirectory() as folder:
                after = distilled(model, variant, seed, options.steps, Path(folder))
            found.setdefault(f"{variant}, after {options.steps} steps, plain prompt", []).append(after)
        print(seed, {name: round(100 * values[-1], 1) for name, values in found.items()}, flush=True)
    for name, values in found.items():
        print(f"| {name} | {', '.join(f'{100 * value:.1f}' for value in values)} | {interval(values)} |")


if __name__ == "__main__":
    main()
