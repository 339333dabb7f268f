"""Training on answers of others: share 0 is the run without them, share 1 supervised fine-tuning; no split changes anything."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from iwopd.config import ConfigError, Optim, make_config
from iwopd.data.prompts import PromptOrder
from iwopd.rollout.local import LocalSampler
from iwopd.runs.directory import RunDirectory
from iwopd.runs.logs import RunError
from iwopd.tiny import build_tokenizer
from iwopd.train import loop, mix
from iwopd.train.run import run_training
from iwopd.train.state import TrainingStoppedError
from iwopd.types import Prompt, Rollout
from models import make_model, save_pair
from ranks import train_in_ranks

HALF = {"share": 0.5, "field": "solution"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pair")
    found = save_pair(folder)
    file = folder / "prompts.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for number, record in enumerate(records):
        record |= {"answer": str(number % 10), "solution": f"{record['prompt']}={number % 10};{number % 7}", "topic": "sums"}
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    rollout = {"prompts_per_step": 12, "max_tokens": 24}
    return {**found, "steps": 3, "rollout": rollout, "checkpoint": {"every": 1}, "tracking": {"console": "off"}}


def mixed(pair: dict[str, Any], given: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**pair, **more, "rollout": {**pair["rollout"], "mix": given, **more.get("rollout", {})}}


def metrics(folder: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if not k.startswith(("time/", "throughput/"))} for record in records]


def train(settings: dict[str, Any], folder: Path, *, resume: bool = False) -> list[dict[str, Any]]:
    run_training(make_config(settings), folder, resume=resume, doctor=False)
    return metrics(folder)


def state(folder: Path, step: int = 3) -> dict[str, torch.Tensor]:
    checkpoint = folder / "checkpoints" / f"step-{step:06d}"
    files = (checkpoint / "model" / "model.safetensors", checkpoint / "optimizer.safetensors")
    return {f"{file.name}/{name}": value for file in files for name, value in load_file(file).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_share_of_0_is_the_run_without_others(pair: dict[str, Any], tmp_path: Path) -> None:
    without = train(pair, tmp_path / "without")
    zero = train(mixed(pair, {"share": 0.0, "source": "teacher", "objective": "forward-kl"}), tmp_path / "zero")
    assert zero == without
    assert same(state(tmp_path / "zero"), state(tmp_path / "without"))
    assert not any(name.startswith("mix/") for name in without[0])


def test_a_share_of_1_is_supervised_fine_tuning(pair: dict[str, Any], tmp_path: Path) -> None:
    """Against plain cross-entropy with transformers, AdamW and a clipped gradient."""
    records = train(mixed(pair, {"share": 1.0, "field": "solution"}, optim={"lr": 1e-3, "weight_decay": 0.1}), tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(pair["models"]["student"]).train()
    optim, tokenizer = Optim(), build_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=optim.betas, eps=optim.eps, weight_decay=0.1)
    lines = Path(pair["data"]["prompts"]).read_text().splitlines()
    items = {str(item["id"]): item for item in map(json.loads, lines)}
    order = PromptOrder([Prompt(name, (1,)) for name in items], 12, 0)
    for record in records:
        total, tokens = torch.zeros(()), 0
        for item in (items[prompt.id] for prompt in order.batch(record["step"])):
            asked = tokenizer(item["prompt"] + "?", add_special_tokens=False)["input_ids"]
            answer = [*tokenizer(item["solution"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            ids = torch.tensor([[*asked, *answer]])
            logits = model(input_ids=ids).logits[0, len(asked) - 1 : -1]
            total = total + torch.nn.functional.cross_entropy(logits, ids[0, len(asked) :], reduction="sum")
            tokens += len(answer)
        (total / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        assert record["loss"] == pytest.approx(float(total.detach()) / tokens, abs=1e-5)
        assert record["mix/logprob"] == pytest.approx(-float(total.detach()) / tokens, abs=1e-5)
        assert record["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert (record["tokens"], record["tokens_written"], record["rollouts"]) == (tokens, 0, 0)
        assert record["mix/share"] == record["mix/token_share"] == 1
        assert record["kl/sampled"] is None
    trained = load_file(tmp_path / "run" / "checkpoints" / "step-000003" / "model" / "model.safetensors")
    for name, value in trained.items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=1e-6, msg=name)


def test_metrics_of_the_student_are_of_its_own_answers(
    pair: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, written = [], LocalSampler.write

    def seen(self: LocalSampler, *given: Any, **more: Any) -> list[Rollout]:
        own.append(written(self, *given, **more))
        return own[-1]

    monkeypatch.setattr(LocalSampler, "write", seen)
    settings = mixed(
        pair, HALF, steps=1, rollout={"samples": 2, "truncated": "mask", "horizon": {"type": "fixed", "tokens": 6}}
    )
    (record,) = train({**settings, "method": {"weights": "cumulative-share"}}, tmp_path / "run")
    (rollouts,) = own
    assert len(rollouts) == record["rollouts"] == 12  # two of each of six prompts
    assert record["prompts"] == 6
    assert record["tokens_written"] == sum(map(len, rollouts))
    assert record["rollout/length_max"] == 6
    assert record["mix/share"] == 0.5
    assert record["mix/length_mean"] > 6  # no horizon, one answer each
    others = round(6 * record["mix/length_mean"])
    assert record["tokens"] == record["tokens_written"] + others
    assert record["mix/token_share"] == pytest.approx(others / record["tokens"])
    assert 1 < record["weights/mean"] <= 1.5


@pytest.mark.parametrize(
    "given",
    [
        HALF,
        {"share": 0.4, "source": "teacher", "objective": "forward-kl", "coefficient": 0.5},
        {"share": 1.0, "steps": 1, "afterwards": 0.3, "source": "teacher", "temperature": 0.0},
    ],
)
def test_micro_batches_change_nothing_and_a_run_resumes_exactly(
    given: dict[str, Any], pair: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = mixed(pair, given)
    whole = train(settings, tmp_path / "whole")
    small = train({**settings, "optim": {**pair["optim"], "token_budget": 60}}, tmp_path / "small")
    for one, other in zip(small[:2], whole[:2], strict=True):  # later, a draw may differ by rounding
        assert one["tokens"] == other["tokens"]
        for name in ("loss", "grad_norm", "mix/loss", "mix/logprob"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5)
    step_of = loop.take_step

    def power_cut(*arguments: Any) -> Any:
        if arguments[3] == 3:
            raise KeyboardInterrupt
        return step_of(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", power_cut)
        with pytest.raises(TrainingStoppedError, match="stopped in step"):
            train(settings, tmp_path / "cut")
    assert train(settings, tmp_path / "cut", resume=True) == whole
    assert same(state(tmp_path / "cut"), state(tmp_path / "whole"))


def test_two_ranks_train_as_one(pair: dict[str, Any], tmp_path: Path) -> None:
    """One process keeps the teacher's states, two compute them again."""
    cold = {"share": 1.0, "steps": 1, "afterwards": 0.5, "source": "teacher", "objective": "forward-kl"}
    settings = mixed(pair, cold, steps=2)
    one = train(settings, tmp_path / "one")
    train_in_ranks(2, settings, tmp_path / "two")
    for mine, theirs in zip(metrics(tmp_path / "two"), one, strict=True):
        for name in ("loss", "grad_norm", "tokens", "tokens_written", "mix/loss", "mix/logprob", "mix/share"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
    for name, value in state(tmp_path / "two", 2).items():
        torch.testing.assert_close(value, state(tmp_path / "one", 2)[name], rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize("truncated", ["mask", "drop"])
@pytest.mark.parametrize(
    "method", [{}, {"objective": "divergence"}, {"weights": "survival"}], ids=["default", "kl", "survival"]
)
def test_a_step_whose_own_answers_were_all_cut_off_trains_on_those_of_others(
    pair: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truncated: str, method: dict[str, Any]
) -> None:
    """Alone such a step ends the run."""
    written = LocalSampler.write

    def cut_off(self: LocalSampler, *given: Any, **more: Any) -> list[Rollout]:
        return [replace(rollout, stop_reason="length") for rollout in written(self, *given, **more)]

    monkeypatch.setattr(LocalSampler, "write", cut_off)
    given = {"truncated": truncated}
    records = train(mixed({**pair, "method": method}, HALF, steps=2, rollout=given), tmp_path / "run")
    assert [record["rollout/truncated"] for record in records] == [1.0, 1.0]
    assert all(record["mix/token_share"] == 1.0 for record in records)
    assert all(record["grad_norm"] > 0 for record in records)
    with pytest.raises(TrainingStoppedError, match="nothing is left to train on"):
        train({**pair, "method": method, "rollout": {**pair["rollout"], **given}}, tmp_path / "alone")


def test_answers_that_are_too_long_are_the_students(pair: dict[str, Any], tmp_path: Path) -> None:
    (record,) = train(mixed(pair, {**HALF, "share": 1.0}, steps=1, rollout={"max_tokens": 12}), tmp_path / "run")
    assert record["mix/too_long"] > 0
    assert record["prompts"] == record["mix/too_long"]
    assert record["mix/share"] == pytest.approx(1 - record["prompts"] / 12)
    with pytest.raises(ConfigError, match="the first 48 answers are all longer than an answer may be"):
        train(mixed(pair, HALF, rollout={"max_tokens": 2}), tmp_path / "none")


def test_a_field_that_is_not_there_is_refused_before_models_are_loaded(pair: dict[str, Any], tmp_path: Path) -> None:
    settings = {**mixed(pair, {"share": 0.5, "field": "solutions"}), "models": dict(pair["models"])}
    with pytest.raises(
        Exception, match=r"48 of 48 .* no text in the field 'solutions', .* answer, id, prompt, solution, topic"
    ):
        run_training(make_config(settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_with_other_answers_is_not_resumed(pair: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(Path(pair["data"]["prompts"]).read_text())
    settings = {**mixed(pair, HALF, steps=1), "data": {"prompts": str(file)}}
    train(settings, tmp_path / "run")
    file.write_text(file.read_text().replace(";", "="))
    with pytest.raises(RunError, match="prompts"):
        train({**settings, "steps": 2}, tmp_path / "run", resume=True)


def test_a_teacher_whose_logits_are_not_its_matrix_cannot_give_distributions(pair: dict[str, Any], tmp_path: Path) -> None:
    make_model("gemma2", seed=2).save_pretrained(tmp_path / "teacher")
    build_tokenizer().save_pretrained(tmp_path / "teacher")
    models = {**pair["models"], "teacher": str(tmp_path / "teacher")}
    settings = mixed(pair, {"share": 0.5, "source": "teacher", "objective": "forward-kl"}, models=models, steps=1)
    with pytest.raises(ConfigError, match=r"rollout\.mix\.objective = 'forward-kl' needs the teacher's output matrix"):
        train(settings, tmp_path / "run")
    (record,) = train(mixed(settings, {"share": 0.5, "source": "teacher"}), tmp_path / "likelihood")
    assert record["mix/loss"] > 0


def test_a_teacher_writes_with_the_prompt_that_it_sees(
    pair: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, write = [], mix.Others.write

    def seen(self: mix.Others, *arguments: Any) -> Any:
        own, others = write(self, *arguments)
        given.extend(others.rollouts)
        return own, others

    monkeypatch.setattr(mix.Others, "write", seen)
    settings = mixed(pair, {"share": 1.0, "source": "teacher"}, steps=1)
    train(settings, tmp_path / "plain")
    train({**settings, "teacher": {"user": "{prompt}={answer}"}}, tmp_path / "told")
    plain, told = given[:12], given[12:]
    assert [one.prompt.token_ids for one in plain] == [one.prompt.token_ids for one in told]
    assert {one.writer for one in given} == {"teacher"}
    assert [one.response_ids.tolist() for one in plain] != [one.response_ids.tolist() for one in told]


def test_a_teacher_whose_scores_are_kept_writes_the_same(pair: dict[str, Any], tmp_path: Path) -> None:
    settings = mixed(pair, {"share": 0.5, "source": "teacher"}, steps=1)
    plain, kept = tmp_path / "plain", tmp_path / "kept"
    train(settings, plain)
    [record] = train({**settings, "teacher": {"cache": str(tmp_path / "cache")}}, kept)
    assert same(state(plain, 1), state(kept, 1))
    assert record["teacher/cache_misses"] == record["rollouts"]


@pytest.mark.slow
def test_a_cold_start_raises_accuracy_on_the_embedded_world(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "steps": 10,
        "threads": 1,
        "models": {"world": "clean"},
        "rollout": {"prompts_per_step": 64, "mix": {"share": 1.0, "steps": 8}},
        "optim": {"lr": 3e-4},
        "eval": {"every": 10, "prompts": 200, "kept_rollouts": 0},
        "tracking": {"console": "off"},
    }
    train(settings, tmp_path / "run")
    before, after = RunDirectory(tmp_path / "run").read("evals.jsonl")
    assert after["mean"] > before["mean"] + 0.1
