"""The trainer in real processes: what it writes, that it resumes exactly, and how it ends when it cannot go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

import forked
from forked import Forked
from iwopd.cli import main
from iwopd.lm import ResponseModel
from iwopd.runs.directory import RunDirectory
from iwopd.train import loop
from iwopd.train.learner import Learner
from models import save_pair
from ranks import train_in_ranks
from waiting import PATIENCE, wait_until

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return save_pair(tmp_path_factory.mktemp("pair"))


def recipe(folder: Path, settings: dict[str, Any], **change: Any) -> Path:
    path = folder / "recipe.toml"
    path.write_text(tomli_w.dumps({**settings, **change}))
    return path


def run(*words: str | Path, code: int = 0) -> str:
    done = forked.run("train", *words, env=ENVIRONMENT)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def metrics(folder: Path) -> list[dict[str, Any]]:
    """What must be equal between two runs: everything but the times."""
    records = RunDirectory(folder).read("metrics.jsonl")
    return [{k: v for k, v in record.items() if not k.startswith(("time/", "throughput/"))} for record in records]


def final_state(folder: Path, step: int = 6) -> dict[str, torch.Tensor]:
    checkpoint = folder / "checkpoints" / f"step-{step:06d}"
    tensors = {f"model/{k}": v for k, v in load_file(checkpoint / "model" / "model.safetensors").items()}
    return {**tensors, **{f"optimizer/{k}": v for k, v in load_file(checkpoint / "optimizer.safetensors").items()}}


def assert_same_run(one: Path, other: Path) -> None:
    assert metrics(one) == metrics(other)
    first, second = final_state(one), final_state(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.fixture(scope="module")
def uninterrupted(pair: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several updates a step, micro-batches of few rows, and an epoch boundary (48 prompts, 16 a step: after step 3)."""
    folder = tmp_path_factory.mktemp("whole")
    words = [
        "train",
        str(recipe(folder, several(pair))),
        "--out",
        str(folder / "run"),
    ]  # its hash seed is not that of the resumed ones
    subprocess.run([sys.executable, "-m", "iwopd", *words], env=ENVIRONMENT, check=True, timeout=PATIENCE)
    return folder / "run"


def several(pair: dict[str, Any]) -> dict[str, Any]:
    return {**pair, "optim": {"lr": 1e-3, "mini_batches": 2, "ppo_epochs": 2, "token_budget": 120}}


def test_a_run_leaves_a_readable_directory(uninterrupted: Path) -> None:
    records = metrics(uninterrupted)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    for record in records:
        assert 1.0 <= record["weights/min"] <= record["weights/mean"] <= record["weights/max"] <= 1.5
        assert record["update/count"] == 4
        assert record["update/padding_waste"] < 0.3
        assert record["tokens"] > 0
        assert len(record["position/abs_gap"]) == 10
    assert any(record["policy/ratio_max"] > 1.0 for record in records)  # later updates of a step are off-policy
    assert sorted(path.name for path in (uninterrupted / "checkpoints").iterdir() if path.name.startswith("step")) == [
        "step-000004",
        "step-000006",
    ]
    about = json.loads((uninterrupted / "run.json").read_text())
    assert about["format"] == 1
    assert "models" not in about  # only those of an embedded world have weights that a name does not tell


def test_the_kl_to_the_teacher_falls(pair: dict[str, Any], tmp_path: Path) -> None:
    run(recipe(tmp_path, {**pair, "steps": 30, "optim": {"lr": 1e-2}}), "--out", tmp_path / "run")
    kl = [record["kl/sampled"] for record in metrics(tmp_path / "run")]
    assert sum(kl[-5:]) / 5 < 0.65 * sum(kl[:2]) / 2


def wait_for_step(folder: Path, step: int, process: Forked) -> None:
    def reached() -> bool:
        assert process.poll() is None, f"the run ended early with exit code {process.returncode}"
        return (folder / "metrics.jsonl").exists() and len(metrics(folder)) >= step

    wait_until(reached, f"step {step}")


def test_mixed_precision_learns_the_same(pair: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 autocast on a CPU: near the float32 run, and the weights stay float32."""
    # Without it oneDNN picks AMX kernels on some virtual machines that do not have them, and the process dies.
    monkeypatch.setitem(ENVIRONMENT, "ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    for precision in ("no", "bf16"):
        run(recipe(tmp_path, pair, precision=precision, steps=2), "--out", tmp_path / precision)
    single, half = metrics(tmp_path / "no"), metrics(tmp_path / "bf16")
    assert single != half
    assert half[0]["loss"] == pytest.approx(single[0]["loss"], rel=0.1, abs=0.02)
    weights = final_state(tmp_path / "bf16", step=2)
    assert all(value.dtype == torch.float32 for name, value in weights.items() if name.startswith("model/"))


@pytest.fixture
def started() -> Iterator[list[Forked]]:
    processes: list[Forked] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def start(started: list[Forked], *words: str | Path) -> Forked:
    process = forked.start("train", *words, env=ENVIRONMENT, quiet=True)
    started.append(process)
    return process


@pytest.mark.slow
@pytest.mark.parametrize(("step", "delay"), [(1, 0.0), (3, 0.05), (4, 0.02), (5, 0.1)])
def test_after_kill_9_a_resumed_run_is_bitwise_the_uninterrupted_one(
    step: int, delay: float, pair: dict[str, Any], uninterrupted: Path, tmp_path: Path, started: list[Forked]
) -> None:
    """Before the first checkpoint, at the epoch boundary, around a save, between saves."""
    made = recipe(tmp_path, several(pair))
    process = start(started, made, "--out", tmp_path / "run")
    wait_for_step(tmp_path / "run", step, process)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()
    run(tmp_path / "run", "--resume")
    assert_same_run(tmp_path / "run", uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_finishes_the_step_saves_and_says_so(
    number: int, code: int, pair: dict[str, Any], uninterrupted: Path, tmp_path: Path, started: list[Forked]
) -> None:
    process = start(started, recipe(tmp_path, several(pair)), "--out", tmp_path / "run")
    wait_for_step(tmp_path / "run", 1, process)
    process.send_signal(number)
    assert process.wait(timeout=PATIENCE) == code
    done = len(metrics(tmp_path / "run"))
    assert done < 6
    assert (tmp_path / "run" / "checkpoints" / f"step-{done:06d}" / "manifest.json").exists()
    assert f"after step {done}" in run(tmp_path / "run", "--resume")
    assert_same_run(tmp_path / "run", uninterrupted)


def test_a_damaged_checkpoint_is_set_aside_and_the_older_one_used(
    pair: dict[str, Any], uninterrupted: Path, tmp_path: Path
) -> None:
    made = recipe(tmp_path, several(pair))
    run(made, "--out", tmp_path / "run", "--steps", "4")
    weights = tmp_path / "run" / "checkpoints" / "step-000004" / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    said = run(made, "--out", tmp_path / "run", "--resume")
    assert "step-000004" in said
    assert "after step 2" in said
    assert (tmp_path / "run" / "checkpoints" / "damaged-step-000004").exists()
    assert_same_run(tmp_path / "run", uninterrupted)


def test_resuming_with_other_settings_or_data_is_refused_by_name(pair: dict[str, Any], tmp_path: Path) -> None:
    made = recipe(tmp_path, {**pair, "steps": 1})
    run(made, "--out", tmp_path / "run")
    said = run(made, "--out", tmp_path / "run", "--resume", "--optim.lr", "5e-3", code=2)
    assert "optim.lr: 0.001 -> 0.005" in said
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(Path(pair["data"]["prompts"]).read_text().replace('"p0"', '"other"'))
    said = run(made, "--out", tmp_path / "run", "--resume", "--data.prompts", prompts, code=2)
    assert "data.prompts: " in said
    assert "training prompts: fingerprint" in said
    run(made, "--out", tmp_path / "run", "--resume", "--optim.lr", "5e-3", "--allow-changes", "--steps", "2")
    assert len(metrics(tmp_path / "run")) == 2
    said = run(made, "--out", tmp_path / "run", code=2)
    assert "holds a run already" in said


def train_here(capfd: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    """The command in this process, where parts of it can be broken: its exit code and what it said to stderr."""
    with pytest.raises(SystemExit) as ended:
        main(["train", *map(str, words)])
    return int(ended.value.code or 0), capfd.readouterr().err


def test_a_broken_gradient_is_skipped_counted_dumped_and_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A NaN in a parameter that only the backward pass of a few tokens meets: log-probs are fine, gradients are not."""
    settings = save_pair(tmp_path)
    whole = Learner._accumulate

    def broken(self: Learner, *arguments: Any) -> Any:
        out = whole(self, *arguments)
        gradient = self.weights.parameters[3].grad
        assert gradient is not None
        gradient[0] = float("nan")
        return out

    monkeypatch.setattr(Learner, "_accumulate", broken)
    code, said = train_here(capfd, recipe(tmp_path, settings), "--out", tmp_path / "run")
    assert code == 1
    assert "loss or gradient was not finite in 3 steps in a row" in said
    records = metrics(tmp_path / "run")
    assert [record["skipped"] for record in records] == [True, True, True]
    assert records[0]["grad_norm"] is None
    dumped = load_file(tmp_path / "run" / "skipped-step-000001.safetensors")
    assert set(dumped) >= {"response_ids", "lengths", "old_logprobs", "teacher_logprobs", "advantages", "weights", "supervised"}
    saved = load_file(tmp_path / "run" / "checkpoints" / "step-000002" / "model" / "model.safetensors")
    before = load_file(Path(settings["models"]["student"]) / "model.safetensors")
    for name, tensor in saved.items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize(
    ("calls", "budget"),
    [
        ("1", 120),  # the update's own pass, in one of its micro-batches
        ("12", 8192),  # the pass that also gives the old log-probs, and the one that the update then makes
    ],
)
def test_logprobs_that_are_no_numbers_skip_one_update_and_the_run_goes_on(
    calls: str,
    budget: int,
    pair: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    hidden, take_step, seen, steps = ResponseModel.token_hidden, loop.take_step, [], []

    def counted(*arguments: Any) -> Any:  # the checks before the first step have gradients, too
        steps.append(1)
        return take_step(*arguments)

    def broken(self: ResponseModel, sequences: Any) -> Any:
        out = hidden(self, sequences)
        if steps and out.requires_grad:
            seen.append(1)
            if str(len(seen)) in calls:
                return out * float("nan")
        return out

    monkeypatch.setattr(ResponseModel, "token_hidden", broken)
    monkeypatch.setattr(loop, "take_step", counted)
    settings = recipe(tmp_path, {**pair, "steps": 3, "optim": {"lr": 1e-3, "token_budget": budget}})
    code, said = train_here(capfd, settings, "--out", tmp_path / "run")
    assert code == 0, said
    records = metrics(tmp_path / "run")
    assert [record["skipped"] for record in records].count(True) == 1
    assert len(list((tmp_path / "run").glob("skipped-step-*.safetensors"))) == 1


def test_one_forward_pass_for_old_logprobs_and_update_resumes_bitwise_and_has_ratio_one(
    pair: dict[str, Any], tmp_path: Path
) -> None:
    made = recipe(tmp_path, pair)
    run(made, "--out", tmp_path / "whole")
    run(made, "--out", tmp_path / "halves", "--steps", "4")
    run(made, "--out", tmp_path / "halves", "--resume")
    assert_same_run(tmp_path / "whole", tmp_path / "halves")
    for record in metrics(tmp_path / "whole"):
        assert record["update/padding_waste"] == 0
        assert abs(record["policy/ratio_min"] - 1) < 1e-6
        assert abs(record["policy/ratio_max"] - 1) < 1e-6


@pytest.mark.parametrize("kind", ["gemma2", "gpt2"])
def test_the_first_update_sees_the_policy_that_wrote_the_rollouts(kind: str, tmp_path: Path) -> None:
    """Gemma 2 caps its logits, GPT-2 has dropout: either would move the first ratio away from 1."""
    settings = save_pair(tmp_path, student=kind, teacher=kind)
    said = run(recipe(tmp_path, {**settings, "steps": 2}), "--out", tmp_path / "run")
    assert ("its own logits are used" in said) == (kind == "gemma2")
    assert "answers are padded" not in said
    for record in metrics(tmp_path / "run"):
        assert abs(record["policy/ratio_min"] - 1) < 1e-4
        assert abs(record["policy/ratio_max"] - 1) < 1e-4


@pytest.mark.parametrize("truncated", ["keep", "mask", "drop"])
def test_truncated_rollouts(truncated: str, pair: dict[str, Any], tmp_path: Path) -> None:
    settings = {**pair, "steps": 2, "rollout": {"prompts_per_step": 16, "max_tokens": 12, "truncated": truncated}}
    run(recipe(tmp_path, settings), "--out", tmp_path / "run")
    for record in metrics(tmp_path / "run"):
        assert 0 < record["rollout/truncated"] < 1
        everything = record["rollout/length_mean"] * record["rollouts"]
        assert (record["tokens"] == round(everything)) == (truncated == "keep")


@pytest.mark.slow
def test_every_method_trains(pair: dict[str, Any], tmp_path: Path) -> None:
    from iwopd.methods import METHODS

    script = tmp_path / "all.py"
    script.write_text(
        "import json, sys\n"
        "from pathlib import Path\n"
        "from iwopd.config import make_config\n"
        "from iwopd.methods import METHODS\n"
        "from iwopd.train.run import run_training\n"
        "settings = json.loads(sys.argv[1])\n"
        "for name, method in METHODS.items():\n"
        "    config = make_config({**settings, 'steps': 2, 'method': method, 'tracking': {'console': 'off'}})\n"
        "    run_training(config, Path(sys.argv[2]) / name)\n"
    )
    words = [sys.executable, script, json.dumps(pair), tmp_path / "runs"]
    subprocess.run(words, env=ENVIRONMENT, check=True, timeout=PATIENCE)
    losses = {name: metrics(tmp_path / "runs" / name)[0]["loss"] for name in METHODS}
    lengths = {metrics(tmp_path / "runs" / name)[0]["rollout/length_mean"] for name in METHODS}
    assert len(lengths) == 1  # same prompts, same noise: the first rollouts are the same
    assert losses["fixed-prefix"] == losses["curriculum"]  # a curriculum starts with the same 30 %
    assert losses["kl-gated"] == pytest.approx(losses["kl-survival"], abs=1e-7)  # a gate starts closed
    apart = [round(loss, 9) for name, loss in losses.items() if name not in ("opd", "exopd", "curriculum", "kl-gated")]
    assert len(set(apart)) == len(apart)


@pytest.mark.slow
def test_two_processes_make_the_update_of_one(pair: dict[str, Any], tmp_path: Path) -> None:
    """The first step starts from the same weights, so its rollouts are the same."""
    settings = {**pair, "steps": 1, "method": {"weights": "ideal", "params": {"alpha": 0.5, "normalize": "mean-one"}}}
    settings |= {"checkpoint": {"every": 1}, "tracking": {"console": "off"}}
    for count in (1, 2):
        train_in_ranks(count, settings, tmp_path / f"run{count}", launcher=count > 1)
    one, two = (metrics(tmp_path / f"run{count}")[0] for count in (1, 2))
    assert one["tokens"] == two["tokens"]
    assert abs(one["loss"] - two["loss"]) < 1e-5
    start_weights = load_file(Path(pair["models"]["student"]) / "model.safetensors")
    after = [final_state(tmp_path / f"run{count}", step=1) for count in (1, 2)]
    moved = torch.cat([(after[0][f"model/{name}"] - value).flatten() for name, value in start_weights.items()])
    apart = torch.cat([(after[0][f"model/{name}"] - after[1][f"model/{name}"]).flatten() for name in start_weights])
    assert moved.norm() > 0
    assert apart.norm() / moved.norm() < 1e-3


@pytest.mark.slow
def test_two_processes_resume_bitwise(pair: dict[str, Any], tmp_path: Path) -> None:
    settings = {**pair, "steps": 3, "checkpoint": {"every": 1}, "tracking": {"console": "off"}}
    train_in_ranks(2, settings, tmp_path / "whole")
    train_in_ranks(2, {**settings, "steps": 2}, tmp_path / "halves")
    train_in_ranks(2, settings, tmp_path / "halves", resume=True)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "halves")
    first, second = final_state(tmp_path / "whole", step=3), final_state(tmp_path / "halves", step=3)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models.student": "/no/such/folder"}, "there is no such folder"),
        ({"data.prompts": "/no/such/file"}, "cannot read prompts from /no/such/file"),
        ({"data.prompts": "EMPTY"}, "has no usable prompts: it has no lines"),
        ({"data.prompts": "BROKEN"}, "line 2 is not JSON"),
        ({"data.prompts": "NAMELESS"}, "line 1: needs a string 'prompt' or a list 'messages'; it has ['question']"),
        ({"rollout.prompts_per_step": "1000"}, "there are 48 training prompts, fewer than the 1000 of one step"),
        ({"rollout.max_tokens": "100000"}, "max_position_embeddings"),
        ({"method.params": "{gamma = -1}"}, "gamma must be finite and not negative, got -1"),
    ],
)
def test_bad_input_is_answered_with_one_line(
    change: dict[str, str], message: str, pair: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "EMPTY").write_text("")
    (tmp_path / "BROKEN").write_text('{"prompt": "1+1"}\n{"prompt": \n')
    (tmp_path / "NAMELESS").write_text('{"question": "1+1"}\n')
    words = [word for name, value in change.items() for word in (f"--{name}", value)]
    words = [str(tmp_path / word) if word.isupper() else word for word in words]
    assert message in run(recipe(tmp_path, pair), "--out", tmp_path / "run", *words, code=2)


def test_a_directory_that_cannot_be_made_is_named(pair: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot make the run directory" in run(recipe(tmp_path, pair), "--out", tmp_path / "file" / "run", code=2)
    assert "is not a run directory" in run(recipe(tmp_path, pair), "--out", tmp_path / "none", "--resume", code=2)


def test_a_teacher_with_another_tokenizer_is_refused_if_it_must_have_the_students(tmp_path: Path) -> None:
    settings = {**save_pair(tmp_path), "teacher": {"tokenizer": "student"}}
    file = tmp_path / "teacher" / "tokenizer.json"
    text = file.read_text()
    assert '"7"' in text
    file.write_text(text.replace('"7"', '"§"').replace('"8"', '"7"').replace('"§"', '"8"'))
    said = run(recipe(tmp_path, settings), "--out", tmp_path / "run", code=2)
    assert "is '7' for the student and '8' for the teacher" in said
