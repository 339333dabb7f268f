"""Every command with other rollout engines: a server over HTTP, and an engine that another package brings by entry point."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from iwopd.cli import add_command, main
from iwopd.commands.engine_options import engine_choice
from iwopd.config import ConfigError, config_toml, load_config, make_config, make_engine_choice
from iwopd.demo import _prepare
from iwopd.rollout.engine import ENGINES, EngineError, Student
from iwopd.rollout.sampling import SamplingSettings
from iwopd.teacher.local import LocalScorer
from iwopd.train.mismatch import MismatchError
from iwopd.train.run import run_training
from iwopd.types import Prompt
from models import make_model, save_byte_model, save_pair
from rollout_server import RolloutServer, serving

PROBLEMS = [{"id": f"p{i}", "problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(6)]
PACKAGE = '''
from pydantic import Field

from iwopd.config import Section
from iwopd.section import Place
from iwopd.rollout.engine import Engine
from iwopd.rollout.local import LocalSampler

EVENTS = []


class Settings(Section):
    error: float = Field(0.0, ge=0, description="added to every log-prob")
    host: Place[str] = Field("here", description="where it is")


class Sampler(LocalSampler):
    error = 0.0

    def sample(self, *arguments, **options):
        rollouts = super().sample(*arguments, **options)
        for rollout in rollouts:
            rollout.rollout_logprobs.add_(self.error)
        return rollouts


class ToyEngine(Engine):
    """The student itself, with log-probs that are a little wrong."""

    settings_type = Settings

    def __init__(self, student, settings):
        super().__init__(student, settings)
        self.settings = settings
        EVENTS.append(f"open at {settings.host}")

    def sampler(self, settings):
        made = Sampler(self.student.model, settings, pad_id=self.student.pad_id, vocab_size=self.student.vocab_size)
        made.error = self.settings.error
        return made

    def close(self):
        EVENTS.append("close")


broken = 7
'''


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Another package is installed: its engines are `toy-engine` and one that is none. Yields what the engine wrote down."""
    folder = tmp_path / "site"
    (folder / "toy_package-1.0.dist-info").mkdir(parents=True)
    (folder / "toy_package.py").write_text(PACKAGE)
    (folder / "toy_package-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-package\nVersion: 1.0\n")
    (folder / "toy_package-1.0.dist-info" / "entry_points.txt").write_text(
        "[iwopd.engines]\ntoy-engine = toy_package:ToyEngine\nbroken = toy_package:broken\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(ENGINES, "_plugins", None)
    monkeypatch.setattr(ENGINES, "_items", dict(ENGINES._items))
    import toy_package  # type: ignore[import-not-found]

    yield toy_package.EVENTS
    del sys.modules["toy_package"]


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("byte-model"))


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in PROBLEMS))
    return path


def command(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 0


def evaluate(model: Path, problems: Path, out: Path, *more: str) -> list[dict[str, Any]]:
    words = ["--model", model, "--tasks", "aime25", "--data", f"aime25={problems}", "--samples", 2, "--max-tokens", 8]
    command("eval", *(str(word) for word in words), "--out", str(out), *more)
    return [json.loads(line) for line in (out / "samples-aime25.jsonl").read_text().splitlines()]


def load_saved(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


# --- a server --------------------------------------------------------------------------------------------------------


def test_evaluation_through_a_server(byte_model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has the model: nothing is loaded here, and no weights are sent. A re-run may find it elsewhere."""
    server = RolloutServer(load_saved(byte_model), max_model_len=2048)

    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("the server has the model")

    monkeypatch.setattr("iwopd.eval.session.load_model", load)
    with serving(server) as url:
        found = evaluate(byte_model, problems, tmp_path / "out", "--engine", "server", "--engine-option", f"url={url}")
    assert len(found) == 12
    assert len({record["text"] for record in found}) > 6  # each sample has a seed of its own
    assert set(server.asked) == {"/v1/models", "/v1/completions"}
    about = json.loads((tmp_path / "out" / "eval.json").read_text())["settings"]
    assert about["engine"] == "server"
    assert "engine_options" not in about  # where it is does not matter
    with serving(server) as url:
        again = evaluate(byte_model, problems, tmp_path / "out", "--engine", "server", "--engine-option", f"url={url}")
    assert again == found


def test_a_server_follows_the_student(tmp_path: Path) -> None:
    """Three steps at a learning rate that moves the student; log-probs stay the trainer's. Padded ids never come."""
    settings = save_pair(tmp_path)
    model = make_model("qwen3", vocab=24, seed=1)
    model.save_pretrained(tmp_path / "student")
    make_model("qwen3", vocab=24, seed=2).save_pretrained(tmp_path / "teacher")
    server = RolloutServer(make_model("qwen3", vocab=24, seed=5))  # other weights at first
    with serving(server) as url:
        folder = tmp_path / "weights"
        changes = {"engine": {"server": {"url": url, "weights_folder": str(folder)}}, "steps": 3}
        tree = {**settings, **changes, "rollout": {**settings["rollout"], "engine": "server", "temperature": 0.8}}
        run_training(make_config(tree), tmp_path / "run")
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["correction/ratio_deviation"] < 1e-3 for step in steps)
    assert server.asked.count("/collective_rpc") == server.asked.count("/reset_prefix_cache") == 3
    assert [path.name for path in folder.iterdir()] == ["weights-000003"]


class Restarted(RolloutServer):
    """Started again in the midst of a step: the request under way is lost, and the weights are the first ones."""

    def __init__(self, model: Any, at: int | None) -> None:
        super().__init__(model)
        self.first = {name: value.clone() for name, value in model.state_dict().items()}
        self.at = at
        """The completion that is lost."""

    def events(self, body: dict[str, Any]) -> Iterator[bytes]:
        return iter(()) if self._lost() else super().events(body)

    def answer(self, path: str, body: Any) -> Any:
        if path == "/v1/completions" and self._lost():
            raise ConnectionAbortedError
        return super().answer(path, body)

    def _lost(self) -> bool:
        if self.at is None or len(self.streams) + self.asked.count("/v1/completions") != self.at:
            return False
        self.at = None
        self.model.load_state_dict(self.first)
        return True


@pytest.mark.parametrize("horizon", [{}, {"type": "drift", "block": 4, "threshold": 1e-6}], ids=["whole", "streamed"])
def test_a_server_that_was_started_again_gets_the_weights_of_the_step(horizon: dict[str, Any], tmp_path: Path) -> None:
    settings = save_pair(tmp_path)

    def weights(name: str, at: int | None) -> dict[str, torch.Tensor]:
        server = Restarted(make_model("qwen3", seed=1), at)
        with serving(server) as url:
            reached = {"url": url, "weights_folder": str(tmp_path / f"{name}-weights"), "max_in_flight": 1}
            changes = {"engine": {"server": reached}, "steps": 3, "optim": {"lr": 3e-3}}
            rollout = {**settings["rollout"], "engine": "server", "mismatch_limit": 9.0, "horizon": horizon}
            run_training(make_config({**settings, **changes, "rollout": rollout}), tmp_path / name)
        assert server.at is None
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        assert all(json.loads(line)["correction/ratio_deviation"] < 1e-3 for line in lines), "other weights wrote"
        return load_file(max((tmp_path / name / "checkpoints").glob("step-*")) / "model" / "model.safetensors")

    calm, disturbed = weights("calm", None), weights("disturbed", 27)  # in the second step
    if not horizon:  # which pieces of answers a teacher reads together depends on time, and so does the rounding of its scores
        assert all(torch.equal(calm[name], disturbed[name]) for name in calm)


def test_limits_and_listeners_of_a_server(tmp_path: Path) -> None:
    model = make_model("qwen3")
    student = Student(lambda: model, vocab_size=21, rows=21)
    prompts = [Prompt(f"p{number}", (2, 3, 4 + number)) for number in range(4)]
    heard: dict[int, Any] = {}
    with serving(RolloutServer(model)) as url:
        choice = make_engine_choice("server", {"url": url}, "the test")
        with choice.open(student) as engine:
            sampler = engine.sampler(SamplingSettings(9))
            limits = [1, 5, 9, 3]
            rollouts = sampler.sample(prompts, seed=0, step=1, samples=2, max_tokens=limits, finished=heard.__setitem__)
            assert [len(rollout) for rollout in rollouts] == [1, 1, 5, 5, 9, 9, 3, 3]
            assert [heard[place] for place in range(8)] == rollouts
            assert (sampler.context, sampler.vocab_size, engine.exact) == (256, 21, False)
    scores = LocalScorer(model).score(rollouts)
    assert all(torch.allclose(rollout.rollout_logprobs, own, atol=1e-4) for rollout, own in zip(rollouts, scores, strict=True))


# --- an engine of another package ------------------------------------------------------------------------------------


def test_evaluation_through_an_engine_of_another_package(
    events: list[str], byte_model: Path, problems: Path, tmp_path: Path
) -> None:
    plain = evaluate(byte_model, problems, tmp_path / "local")
    options = ["--engine", "toy-engine", "--engine-option", "host=there", "--engine-option", "error=0.5"]
    assert evaluate(byte_model, problems, tmp_path / "toy", *options) == plain  # log-probs do not matter here
    assert events == ["open at there", "close"]
    about = json.loads((tmp_path / "toy" / "eval.json").read_text())["settings"]
    assert (about["engine"], about["engine_options"]) == ("toy-engine", {"error": 0.5})


def test_training_with_an_engine_of_another_package(events: list[str], tmp_path: Path) -> None:
    """It is not exact: its log-probs are corrected, and watched."""
    tree = {**save_pair(tmp_path), "steps": 2, "engine": {"toy-engine": {"error": 0.001}}}
    tree["rollout"] = {**tree["rollout"], "engine": "toy-engine"}
    config = make_config(tree)
    run_training(config, tmp_path / "run", doctor=False)  # it would refuse such log-probs
    assert events == ["open at here", "close"]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(step["correction/logprob_difference"] == pytest.approx(0.001, rel=0.05) for step in steps)
    assert load_config(tmp_path / "run" / "config.toml") == config
    tree["engine"] = {"toy-engine": {"error": 0.1}}
    with pytest.raises(MismatchError, match=r"'toy-engine' differ from the trainer's by 0\.1"):
        run_training(make_config(tree), tmp_path / "wrong", doctor=False)
    assert events[2:] == ["open at here", "close"]


def test_a_probe_with_other_engines(events: list[str], tmp_path: Path) -> None:
    save_pair(tmp_path)
    records = [{"prompt": f"{number}+2", "answer": "3"} for number in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ["probe", "--student", str(tmp_path / "student"), "--teacher", str(tmp_path / "teacher"), "--skip", "alignment"]
    words += ["--prompts", str(tmp_path / "prompts.jsonl"), "--max-tokens", "8"]
    found = []
    for number, more in enumerate(([], ["--engine", "toy-engine", "--teacher-engine", "toy-engine"])):
        out = tmp_path / f"{number}.json"
        command(*words, "-o", str(out), *more)
        found.append(json.loads(out.read_text()))
    assert events == ["open at here", "close"] * 2
    assert found[0]["handoff"] == found[1]["handoff"]
    assert [probe["settings"]["teacher_engine"] for probe in found] == ["local", "toy-engine"]


def test_the_runs_of_a_demo_use_its_engine(events: list[str], tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers(), "demo")
    words = ["--engine", "toy-engine", "--engine-option", "error=0.001", "--out", str(tmp_path / "demo")]
    options = parser.parse_args(["demo", *words])
    (job,) = _prepare(options, ["opd"], engine_choice(options)).values()
    assert (job.config.rollout.engine, job.config.engine.of("toy-engine").model_dump()["error"]) == ("toy-engine", 0.001)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("toy-engin", {}, "unknown rollout engine 'toy-engin'; did you mean 'toy-engine'"),
        ("toy-engine", {"eror": 1}, "eror: there is no such setting; did you mean 'error'"),
        ("toy-engine", {"error": -1}, "error: must be at least 0"),
        ("broken", {}, r"rollout engine 'broken' \(toy_package:broken\): expected a subclass of"),
        ("server", {}, "needs engine.server.url"),
    ],
)
def test_wrong_choices_are_refused(events: list[str], name: str, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_engine_choice(name, values, "--engine-option")


def test_a_recipe_names_the_place_of_a_wrong_setting(events: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"engine\.toy-engine\.eror: there is no such setting; did you mean 'error'"):
        make_config({"models": {"world": "clean"}, "engine": {"toy-engine": {"eror": 1}}})
    config = make_config({"models": {"world": "clean"}, "engine": {"toy-engine": {"error": 1}}})
    assert "[engine.toy-engine]" in config_toml(config)
    assert "engine.vllm" not in config_toml(config)


def test_every_error_of_an_engine_ends_a_run_in_the_same_way() -> None:
    from iwopd.rollout.connection import ServerError
    from iwopd.rollout.vllm import VllmError
    from iwopd.rollout.weights import WeightSyncError

    assert all(issubclass(kind, EngineError) for kind in (ServerError, VllmError, WeightSyncError))
