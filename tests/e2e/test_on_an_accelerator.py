"""Everything that runs on an accelerator, on a pretend one: the CPU's tokens, losses and weights, no mixed devices, few waits.

Nothing is patched: Accelerate takes the device from its own environment variable, commands from `--device`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tomli_w
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor

from iwopd.adapters import add_adapter
from iwopd.algo.objectives import make_objective
from iwopd.analysis.probe.result import read_probe
from iwopd.cli import add_command, main
from iwopd.config import Optim, make_config
from iwopd.eval.session import Request, run_evaluation
from iwopd.lm import HeadCheck, Sequences
from iwopd.rollout import local
from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampling import SamplingSettings, choose
from iwopd.stages import StageListener
from iwopd.teacher.local import LocalScorer
from iwopd.tiny import task
from iwopd.train.learner import Learner, Update
from iwopd.train.micro_batch import Distributions
from iwopd.train.ranks import Ranks
from iwopd.train.run import run_training
from iwopd.train.scoring import evidence_of, loss_columns
from iwopd.types import Prompt, Rollout, ScoredRollout, TokenBatch
from models import make_model, save_pair
from pretend_gpu import PretendGPU, Sync, pretend_gpu

CPU = torch.device("cpu")
SAME = {"rtol": 1e-6, "atol": 1e-6}
SAME_SCORES = {"rtol": 1e-6, "atol": 5e-6}
"""Log-probs of models on different paths: on a CPU sequences are packed and products of few rows take other kernels. They are
differences of logits up to 30, whose last digit in float32 is 2e-6."""

SYNCS_PER_TOKEN = 2
SYNCS_PER_SCORED_BATCH = 2
"""The ids are checked, the scores are read."""
SYNCS_PER_MICRO_BATCH = 5
"""Which tokens count, whether inputs and results are numbers, the statistics, the loss."""
SYNCS_PER_UPDATE = 3


@pytest.fixture
def gpu() -> Iterator[PretendGPU]:
    with pretend_gpu() as opened:
        yield opened


@pytest.fixture
def accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Accelerator]]:
    """An `Accelerator` on a device."""

    def on(device: torch.device, precision: str = "no") -> Accelerator:
        AcceleratorState._reset_state(reset_partial_state=True)
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", str(device))
        made = Accelerator(mixed_precision=precision)
        assert made.device == device
        return made

    yield on
    AcceleratorState._reset_state(reset_partial_state=True)


def ours(gpu: PretendGPU) -> list[Sync]:
    """Waits that our code asked for; transformers' own are its own affair."""
    return [sync for sync in gpu.syncs if sync.by == "iwopd"]


# --- sampler --------------------------------------------------------------------------------------------------------

PROMPTS = [Prompt(f"p{i}", tuple(2 + (5 * i + j) % 19 for j in range(3 + i % 4))) for i in range(6)]


def write(gpu: PretendGPU, kind: str, path: Any, device: torch.device, settings: SamplingSettings) -> list[Rollout]:
    model = make_model(kind).to(device)
    sampler = LocalSampler(model, settings, path=path, cache_tokens=200)  # not all rows at once: some join later
    gpu.syncs.clear()
    return sampler.sample(PROMPTS, seed=3, step=1, samples=2)


@pytest.mark.parametrize(
    ("kind", "path"), [("qwen3", "lean"), ("llama", "lean"), ("qwen3", "model"), ("gemma2", "model"), ("gpt2", "model")]
)
def test_the_sampler_writes_the_same(gpu: PretendGPU, kind: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SamplingSettings(16, top_p=0.9 if kind == "llama" else 1.0, stop_ids={1})
    expected = write(gpu, kind, path, CPU, settings)
    draws: list[Any] = []

    def counted(*given: Any) -> Any:
        draws.append(choose(*given))
        return draws[-1]

    monkeypatch.setattr(local, "choose", counted)
    written = write(gpu, kind, path, gpu.device, settings)
    for one, other in zip(written, expected, strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()
        torch.testing.assert_close(one.rollout_logprobs, other.rollout_logprobs, **SAME_SCORES)
    assert {rollout.stop_reason for rollout in written} == {"eos", "length"}
    assert len(draws) > settings.max_tokens  # rows joined later
    waits = gpu.syncs if path == "lean" else ours(gpu)
    assert len(waits) <= SYNCS_PER_TOKEN * len(draws), waits


# --- scorer and head check ------------------------------------------------------------------------------------------


LENGTHS = (9, 3, 14, 1, 9)


def rollouts(lengths: Sequence[int] = LENGTHS) -> list[Rollout]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for number, length in enumerate(lengths):
        prompt = Prompt(f"p{number}", tuple(torch.randint(2, 21, (5,), generator=generator).tolist()))
        made.append(Rollout(prompt, torch.randint(1, 21, (length,), generator=generator), torch.zeros(length), "length"))
    return made


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt2"])
def test_scores_and_head_checks_are_the_same(gpu: PretendGPU, kind: str) -> None:
    items, budget = rollouts(), 30

    def look(device: torch.device) -> tuple[HeadCheck, list[Tensor], int]:
        scorer = LocalScorer(make_model(kind).to(device), vocab_size=21, token_budget=budget)
        found = scorer.check_head(Sequences.from_rollouts(items), trained=True)
        gpu.syncs.clear()
        lengths = [len(item.prompt.token_ids) + len(item) for item in items]
        return found, scorer.score(items), len(scorer.lm.micro_batches(lengths, budget))

    expected, wanted, _ = look(CPU)
    found, scores, batches = look(gpu.device)
    assert found.fused == expected.fused == (kind != "gemma2")
    assert batches > 1
    assert len(ours(gpu)) <= SYNCS_PER_SCORED_BATCH * batches, gpu.syncs
    for one, other in zip(scores, wanted, strict=True):
        assert one.device == CPU
        torch.testing.assert_close(one, other, **SAME_SCORES)


# --- learner --------------------------------------------------------------------------------------------------------


class Learnt(NamedTuple):
    update: Update
    weights: dict[str, Tensor]
    steps: dict[str, Tensor]
    """How far the weights went."""
    syncs: list[Sync]
    micro_batches: int


LEARNERS: dict[str, dict[str, Any]] = {
    "one update": {},
    "a forward pass ahead": {"ahead": True},
    "many updates": {"optim": {"ppo_epochs": 2, "mini_batches": 2}},
    "KL and entropy": {"method": {"kl_coef": 0.2, "entropy_coef": 0.1, "weights": "cumulative-share"}},
    "divergence": {"method": {"objective": "divergence"}},
    "LoRA": {"lora": True},
    "gradient checkpointing": {"optim": {"gradient_checkpointing": True}},
    "soft cap": {"kind": "gemma2"},
    "GPT-2": {"kind": "gpt2"},
}


def learn(
    gpu: PretendGPU,
    accelerator: Accelerator,
    *,
    kind: str = "qwen3",
    method: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    lora: bool = False,
    ahead: bool = False,
) -> Learnt:
    """The update of a fresh model on the accelerator's device. AdamW's epsilon is large: it divides by tiny gradients."""
    items, model = rollouts((9,) * 5 if ahead else LENGTHS), make_model(kind)  # without packing only like lengths share a pass
    if lora:
        torch.manual_seed(0)
        add_adapter(model, 4, 8.0, ["all-linear"])
    initial = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    model.to(accelerator.device)
    objective, budget = make_objective(method or {}), 500 if ahead else 30
    student = LocalScorer(model, vocab_size=21, autocast=accelerator.autocast)
    student.check_head(Sequences.from_rollouts(items), trained=True)
    teacher = LocalScorer(make_model("llama", seed=5).to(accelerator.device), vocab_size=21)
    settings = Optim(lr=1e-2, eps=1e-2, token_budget=budget, **(optim or {}))
    whole = Distributions.of(teacher) if objective.needs_teacher_distribution else None
    learner = Learner(student.lm, settings, objective, Ranks(), whole)
    forward = learner.forward(items) if ahead else None
    assert (forward is not None) == ahead
    old = student.score(items) if forward is None else [one.logprobs for one in forward.scores]
    scored = zip(items, old, teacher.score(items), teacher.score(items), strict=True)
    batch = TokenBatch.collate([ScoredRollout(*one) for one in scored])
    columns = loss_columns(objective, batch, evidence_of(batch))
    gpu.syncs.clear()
    update = learner.update(batch, columns, seed=0, step=1, forward=forward)
    waits = ours(gpu)
    lengths = [len(item.prompt.token_ids) + len(item) for item in items]
    weights = {name: weight.detach().cpu() for name, weight in model.named_parameters() if weight.requires_grad}
    steps = {name: weight - initial[name] for name, weight in weights.items()}
    return Learnt(update, weights, steps, waits, len(student.lm.micro_batches(lengths, budget)))


@pytest.mark.parametrize("case", LEARNERS.values(), ids=LEARNERS.keys())
def test_an_update_is_the_same(gpu: PretendGPU, accelerate: Callable[..., Accelerator], case: dict[str, Any]) -> None:
    expected = learn(gpu, accelerate(CPU), **case)
    learnt = learn(gpu, accelerate(gpu.device), **case)
    assert learnt.update.updates == expected.update.updates == (4 if "ppo_epochs" in case.get("optim", {}) else 1)
    assert learnt.update.loss == pytest.approx(expected.update.loss, rel=1e-6, abs=1e-6)
    assert learnt.update.grad_norm == pytest.approx(expected.update.grad_norm, rel=1e-5)
    for name, weight in learnt.weights.items():
        torch.testing.assert_close(weight, expected.weights[name], msg=name, **SAME)
    passes = case.get("optim", {}).get("ppo_epochs", 1) * (learnt.micro_batches + 1)  # mini-batches cut one more
    assert len(learnt.syncs) <= SYNCS_PER_MICRO_BATCH * passes + SYNCS_PER_UPDATE * learnt.update.updates, learnt.syncs


@pytest.mark.parametrize("case", ["one update", "divergence", "LoRA", "gradient checkpointing"])
def test_an_update_in_mixed_precision(gpu: PretendGPU, accelerate: Callable[..., Accelerator], case: str) -> None:
    """bfloat16 keeps less than three digits, and other kernels round elsewhere: every step agrees to a fiftieth of its size."""
    expected = learn(gpu, accelerate(CPU, "bf16"), **LEARNERS[case])
    accelerator = accelerate(gpu.device, "bf16")
    with accelerator.autocast():
        assert torch.get_autocast_dtype(gpu.device.type) == torch.bfloat16
        assert torch.is_autocast_enabled(gpu.device.type)
    learnt = learn(gpu, accelerator, **LEARNERS[case])
    assert learnt.update.loss == pytest.approx(expected.update.loss, abs=1e-3)
    for name, step in learnt.steps.items():
        assert learnt.weights[name].dtype == torch.float32
        assert float((step - expected.steps[name]).norm()) <= 0.02 * float(expected.steps[name].norm()) + 1e-6, name


# --- whole commands -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a small run with an evaluation; beside its models lie solved problems and a task."""
    folder = tmp_path_factory.mktemp("pair")
    settings = save_pair(folder, prompts=12)
    expressions = ["1+2*3", "4*5+6", "7-2*2", "3+3*3", "9-1*4", "2*2+5"]
    records = [
        {"id": text, "prompt": text, "problem": text, "answer": task.answer(text), "solution": task.right_solution(text)}
        for text in expressions
    ]
    (folder / "solved.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "solved.toml").write_text('checker = "exact"\nfile = "solved.jsonl"\nmax_tokens = 8\n')
    return {
        **settings,
        "steps": 3,
        "folder": folder,
        "rollout": {"prompts_per_step": 4, "max_tokens": 10},
        "optim": {"lr": 1e-3, "eps": 1e-3, "token_budget": 60},
        "eval": {"tasks": [str(folder / "solved.toml")], "every": 3, "prompts": 4},
    }


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """What a step measured: no times, and no shares of padding, which a CPU does without."""
    left_out = ("time/", "throughput/", "update/padding_waste")
    return {name: value for name, value in record.items() if isinstance(value, float) and not name.startswith(left_out)}


def train(settings: dict[str, Any], out: Path, **options: Any) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Metrics, and the weights and the optimizer's state at the end."""
    run_training(make_config({name: value for name, value in settings.items() if name != "folder"}), out, **options)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    last = out / "checkpoints" / "step-000003"
    return records, load_file(last / "model" / "model.safetensors") | load_file(last / "optimizer.safetensors")


def test_a_run_is_the_same(
    gpu: PretendGPU, accelerate: Callable[..., Accelerator], pair: dict[str, Any], tmp_path: Path
) -> None:
    """Three steps with doctor, evaluation and checkpoints; the third once more, from the second's checkpoint."""
    accelerate(CPU)
    expected, wanted = train(pair, tmp_path / "cpu")
    accelerate(gpu.device)
    records, weights = train(pair, tmp_path / "gpu")
    assert gpu.memory.peak > 0
    for record, other in zip(records, expected, strict=True):
        assert numbers(record) == pytest.approx(numbers(other), rel=1e-5, abs=2e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, wanted[name], msg=name, **SAME)
    shutil.rmtree(tmp_path / "gpu" / "checkpoints" / "step-000003")
    accelerate(gpu.device)
    again, resumed = train(pair, tmp_path / "gpu", resume=True)
    assert [numbers(record) for record in again] == [numbers(record) for record in records]
    assert all(torch.equal(weight, weights[name]) for name, weight in resumed.items())


def test_the_doctor_finds_nothing_wrong(
    gpu: PretendGPU,
    accelerate: Callable[..., Accelerator],
    pair: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    accelerate(gpu.device)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps({name: value for name, value in pair.items() if name != "folder"}))
    with pytest.raises(SystemExit) as end:
        main(["doctor", str(recipe), "--out", str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert not end.value.code, said
    assert "fail" not in {line[:4] for line in said.splitlines()}, said
    assert sum(line.startswith("pass  echo") for line in said.splitlines()) >= 2, said


def test_an_evaluation_is_the_same(gpu: PretendGPU, pair: dict[str, Any], tmp_path: Path) -> None:
    folder = pair["folder"]

    def evaluated(device: torch.device, out: Path) -> list[Any]:
        request = Request(str(folder / "student"), [str(folder / "solved.toml")], samples=2, device=str(device))
        run_evaluation(request, out, StageListener())
        samples = (out / "samples-solved.jsonl").read_text().splitlines()
        return [{name: value for name, value in json.loads(line).items() if name != "seconds"} for line in samples]

    assert evaluated(gpu.device, tmp_path / "gpu") == evaluated(CPU, tmp_path / "cpu")


def test_a_probe_is_the_same(gpu: PretendGPU, pair: dict[str, Any], tmp_path: Path) -> None:
    folder = pair["folder"]

    def probed(device: torch.device) -> dict[str, Any]:
        parser = argparse.ArgumentParser()
        add_command(parser.add_subparsers(dest="command", required=True), "probe")
        words = ["--student", folder / "student", "--teacher", folder / "teacher", "--prompts", folder / "solved.jsonl"]
        words += ["--task", "tiny", "--max-tokens", 8, "--continuations", 1, "--batches", 2, "--fractions", "0,0.5"]
        words += ["--device", device, "-o", tmp_path / "out.json"]
        options = parser.parse_args(["probe", *map(str, words)])
        assert options.run(options, []) == 0
        found = read_probe(tmp_path / "out.json").model_dump()
        assert found["missing"] == {}
        return {name: found[name] for name in ("handoff", "positions", "overlap", "likelihood", "rules", "alignment")}

    expected = probed(CPU)
    assert _flat(probed(gpu.device)) == pytest.approx(_flat(expected), rel=1e-4, abs=1e-5, nan_ok=True)


def _flat(value: Any, name: str = "") -> dict[str, float]:
    """All numbers of a nested object, by their path."""
    if isinstance(value, dict):
        return {path: number for key, item in value.items() for path, number in _flat(item, f"{name}.{key}").items()}
    if isinstance(value, list):
        return {path: number for place, item in enumerate(value) for path, number in _flat(item, f"{name}.{place}").items()}
    return {name: float(value)} if isinstance(value, int | float) else {}
