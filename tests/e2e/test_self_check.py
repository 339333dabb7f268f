"""`iwopd doctor --self-check`: healthy recipes pass, and every fault that looks like a healthy run is caught by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from faulty_teacher import FaultyScorer, FaultyServingModel
from iwopd.cli import main
from iwopd.config import Config, make_config
from iwopd.stages import StageListener
from iwopd.teacher.own_dialect import OwnDialect
from iwopd.teacher.vllm_dialect import VllmDialect
from iwopd.train.assembly import assemble
from iwopd.train.doctor import examine_pipeline
from iwopd.train.doctor.findings import Finding
from iwopd.train.learner import Learner
from iwopd.train.micro_batch import MicroBatchLoss
from iwopd.train.parts import Parts
from models import save_pair
from served_teacher import served

VOCAB = 21


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pair")
    save_pair(path)
    return path


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "steps": 2,
        "threads": torch.get_num_threads(),
        "models": {"student": str(folder / "student"), "teacher": str(folder / "teacher")},
        "data": {"prompts": str(folder / "prompts.jsonl")},
        "rollout": {"prompts_per_step": 8, "max_tokens": 24},
        "method": {"weights": "cumulative-share"},
        "tracking": {"console": "off"},
    }
    return given | changes


@pytest.fixture(scope="module")
def local(folder: Path) -> Iterator[tuple[Config, Parts]]:
    config = make_config(settings(folder))
    with assemble(config, print) as parts:
        yield config, parts


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Any]:
    model = AutoModelForCausalLM.from_pretrained(folder / "teacher")
    with served(model, vocab_size=VOCAB) as running:
        running.model = FaultyServingModel(model, vocab_size=VOCAB, max_length=256)
        yield running


@pytest.fixture(scope="module")
def by_server(folder: Path, server: Any) -> Iterator[tuple[Config, Parts]]:
    config = make_config(settings(folder, teacher={"urls": [server.url], "name": "m", "dialect": "iwopd"}))
    with assemble(config, print) as parts:
        yield config, parts


def failed(found: Sequence[Finding]) -> dict[str, str]:
    return {one.check: one.message for one in found if one.level == "fail"}


def examined(pair: tuple[Config, Parts]) -> list[Finding]:
    return list(examine_pipeline(*pair))


# --- healthy --------------------------------------------------------------------------------------------------------


def test_a_local_pair_passes_and_is_left_as_it_was(local: tuple[Config, Parts]) -> None:
    _, parts = local
    before = {name: values.clone() for name, values in parts.student.state_dict().items()}
    stages: list[str] = []

    class Heard(StageListener):
        def stage(self, name: str, total: int, done: int = 0) -> None:
            stages.append(f"{name} {total}")

        def advance(self, count: int, tokens: int = 0) -> None:
            stages.append(f"{tokens} tokens")

    found = list(examine_pipeline(*local, Heard()))
    assert failed(found) == {}
    checks = ["self gap", "self repeat", "self spread", "self shift", "self update", "self update"]
    assert [one.check for one in found] == checks
    assert stages[0] == "self-check 4"
    assert len(stages) == 5
    assert int(stages[1].split()[0]) <= 6 * 24
    assert all(torch.equal(values, before[name]) for name, values in parts.student.state_dict().items())
    assert not parts.learner.optimizer.state
    assert parts.learner.optimizer.param_groups[0]["lr"] == local[0].optim.lr
    assert all(one.grad is None for one in parts.student.parameters())


@pytest.mark.parametrize("dialect", ["iwopd", "vllm"])
def test_a_served_teacher_passes(folder: Path, server: Any, by_server: tuple[Config, Parts], dialect: str) -> None:
    server.model.break_down(None)
    config, parts = by_server
    if dialect == "vllm":
        config = make_config(settings(folder, teacher={"urls": [server.url], "name": "m"}))
        with assemble(config, print) as parts:
            found = examined((config, parts))
    else:
        found = examined((config, parts))
    assert failed(found) == {}
    (gap,) = (one for one in found if one.check == "self gap")
    assert f"a server of it on this machine, dialect {dialect}" in gap.message
    (loss,) = (one for one in found if one.check == "self loss")
    assert "the loss is the same" in loss.message


def test_a_copy_of_a_served_teacher_sees_the_prompt_that_it_sees(folder: Path, server: Any) -> None:
    server.model.break_down(None)
    config = make_config(settings(folder, teacher={"urls": [server.url], "name": "m", "user": "{prompt}+1"}))
    with assemble(config, print) as parts:
        (loss,) = (one for one in examined((config, parts)) if one.check == "self loss")
    assert "the loss is the same" in loss.message


@pytest.mark.parametrize(
    "method",
    [
        {"objective": "divergence"},
        {"objective": "divergence", "support": "top-k", "k": 4},
        {"weights": "prefix-only"},
        {"entropy_coef": 0.01},
        {"advantage": "exopd"},
    ],
    ids=lambda method: "-".join(str(value) for value in method.values()),
)
def test_other_methods_pass(folder: Path, method: dict[str, Any]) -> None:
    config = make_config(settings(folder, method=method))
    with assemble(config, print) as parts:
        assert failed(examined((config, parts))) == {}


def test_the_command_adds_a_block_of_lines(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps(settings(folder)))
    with pytest.raises(SystemExit) as end:
        main(["doctor", str(recipe), "--self-check", "--out", str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert int(end.value.code or 0) == 0, said
    for check in ("gap", "repeat", "spread", "shift", "update"):
        assert f"  self {check}" in said
    for other in ("--static", "--gpu"):
        with pytest.raises(SystemExit) as end:
            main(["doctor", str(recipe), "--self-check", other])
        assert end.value.code == 2
    assert "leave --static and --gpu out" in capsys.readouterr().err


# --- faults of a server ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        ("the token after", "self shift", "the score 1 before its own: each score is that of the token after"),
        ("the token before", "self shift", "the score 1 after its own: each score is that of the token before"),
        ("uniform", "self spread", "finds every id as likely as any other"),
        ("wakes up uniform", "self repeat", "no rounding does that"),
        ("never twice the same", "self repeat", "asked the same again"),
        ("depends on its company", "self repeat", "asked one by one"),
        ("another temperature", "self loss", "the loss differs"),
    ],
)
def test_a_faulty_server_is_caught(server: Any, by_server: tuple[Config, Parts], fault: str, check: str, words: str) -> None:
    server.model.break_down(fault)
    found = failed(examined(by_server))
    assert words in found.get(check, ""), found


def test_scores_that_are_none_are_a_line_and_no_end(server: Any, by_server: tuple[Config, Parts]) -> None:
    """The client refuses a log-prob above 0; the doctor says so and goes on."""
    server.model.break_down("above 0")
    found = failed(examined(by_server))
    assert {"self repeat", "self update"} <= set(found)
    assert "it must be at most 0" in found["self repeat"]


# --- faults of the pipeline -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["the token after", "the token before", "uniform", "another temperature"])
def test_a_faulty_local_scorer_is_no_twin_of_the_student(
    local: tuple[Config, Parts], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr("iwopd.train.doctor.self_check.LocalScorer", FaultyScorer)
    monkeypatch.setattr(FaultyScorer, "fault", fault)
    found = failed(examined(local))
    assert "It should be 0" in found["self gap"]


@pytest.mark.parametrize(("dialect", "kind"), [("iwopd", OwnDialect), ("vllm", VllmDialect)])
def test_a_client_that_reads_the_wrong_places_is_no_twin_of_the_student(
    folder: Path, server: Any, monkeypatch: pytest.MonkeyPatch, dialect: str, kind: Any
) -> None:
    """The API's scores are not those of a local model."""
    server.model.break_down(None)
    config = make_config(settings(folder, teacher={"urls": [server.url], "name": "m", "dialect": dialect}))
    with assemble(config, print) as parts:
        read = kind.scores

        def shifted(*given: Any) -> Any:
            return [replace(one, logprobs=one.logprobs.roll(1)) for one in read(*given)]

        monkeypatch.setattr(kind, "scores", shifted)
        found = failed(examined((config, parts)))
    assert set(found) >= {"self gap", "self loss"}
    assert "It should be 0" in found["self gap"]


def test_labels_in_the_denominator_are_caught(local: tuple[Config, Parts], monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that also counts the prompts' tokens."""
    optimize = Learner._optimize

    def counting_prompts(self: Any, batch: Any, columns: Any, rows: Any, denominator: int, forward: Any) -> Any:
        return optimize(self, batch, columns, rows, denominator + int(batch.prompt_lengths.sum()), forward)

    monkeypatch.setattr(Learner, "_optimize", counting_prompts)
    found = failed(examined(local))
    assert set(found) == {"self update"}
    assert "as if it were divided by" in found["self update"]


def test_a_mean_of_micro_batches_is_caught(local: tuple[Config, Parts], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each micro-batch divided by its own tokens: longer answers count less."""
    forward = MicroBatchLoss.forward

    def own_mean(self: Any, sequences: Any, columns: dict[str, Tensor], denominator: int, hidden: Any = None) -> Any:
        return forward(self, sequences, columns, int(columns["supervised"].sum()), hidden)

    monkeypatch.setattr(MicroBatchLoss, "forward", own_mean)
    found = failed(examined(local))
    assert set(found) == {"self update"}


def test_tokens_that_the_trainer_counts_and_nobody_wrote_are_caught(
    local: tuple[Config, Parts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token of each answer leaves the loss, as where labels are shifted twice."""
    update = Learner.update

    def without_first(self: Any, batch: Any, columns: dict[str, Tensor], **given: Any) -> Any:
        first = batch.lengths.cumsum(0) - batch.lengths
        supervised = columns["supervised"].clone()
        supervised[first] = False
        return update(self, batch, {**columns, "supervised": supervised}, **given)

    monkeypatch.setattr(Learner, "update", without_first)
    assert "the trainer counts" in failed(examined(local))["self update"]


def test_no_further_check_begins_when_time_is_up(local: tuple[Config, Parts], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iwopd.train.doctor.self_check.SECONDS", -1.0)
    found = examined(local)
    assert {one.level for one in found} == {"warn"}
    assert all("left out" in one.message for one in found)
