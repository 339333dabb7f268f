"""Training with a teacher that has another tokenizer: local and served; and identical tokenizers, which must notice nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from iwopd.config import make_config
from iwopd.errors import ConfigError
from iwopd.models import load_model, load_tokenizer
from iwopd.report.token_columns import TokenTable, pack_rollout
from iwopd.runs.directory import RunDirectory
from iwopd.teacher.cached import CachedScorer
from iwopd.teacher.foreign import ForeignScorer
from iwopd.tiny import build_tokenizer
from iwopd.train.assembly import assemble
from iwopd.train.doctor import examine_recipe
from iwopd.train.doctor.findings import DoctorError
from iwopd.train.doctor.self_check import examine_pipeline
from iwopd.train.run import run_training
from iwopd.train.state import TrainingStoppedError
from models import make_model, save_byte_model, save_pair
from served_teacher import served
from trained_tokenizers import save_model, trained

STEPS = 8


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a byte-level student and a SentencePiece teacher."""
    folder = tmp_path_factory.mktemp("pair")
    save_model(folder / "student", trained("byte-level", 420, end="<end>"), seed=1)
    save_model(folder / "teacher", trained("sentencepiece-bpe", 520), seed=2)
    lines = [json.dumps({"id": str(n), "prompt": f"What is {n} plus {n + 3}?", "answer": str(2 * n + 3)}) for n in range(32)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    (folder / "problems.jsonl").write_text(json.dumps({"id": "a", "problem": "1+1", "answer": "2"}) + "\n")
    evaluation = {"tasks": ["aime25"], "data": {"aime25": str(folder / "problems.jsonl")}, "prompts": 1, "max_tokens": 12}
    return {
        "steps": STEPS,
        "threads": 1,
        "models": {"student": str(folder / "student"), "teacher": str(folder / "teacher")},
        "data": {"prompts": str(folder / "prompts.jsonl")},
        "rollout": {"prompts_per_step": 16, "max_tokens": 20},
        "optim": {"lr": 1e-2},
        "method": {"weights": "cumulative-share"},
        "checkpoint": {"every": STEPS},
        "eval": {**evaluation, "every": STEPS},
        "tracking": {"console": "off"},
    }


def records(folder: Path) -> list[dict[str, Any]]:
    return list(RunDirectory(folder).read("metrics.jsonl"))


@pytest.fixture(scope="module")
def trained_run(pair: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    run_training(make_config(pair), folder)  # the doctor examines it, too
    return folder


def test_the_gap_falls(trained_run: Path) -> None:
    found = records(trained_run)
    assert len(found) == STEPS
    first, last = (sum(one["gap/abs_mean"] for one in some) for some in (found[:2], found[-2:]))
    assert last < 0.8 * first
    for one in found:
        assert one["spans/count"] <= one["tokens"]
        assert one["spans/tokens"] >= 1
        assert one["tokens"] + one["spans/unscored"] <= one["tokens_written"]
        assert 1 <= one["weights/min"] <= one["weights/max"] <= 1.5


def test_kept_rollouts_say_which_tokens_belong_together(trained_run: Path) -> None:
    found = list(RunDirectory(trained_run).read("rollouts.jsonl"))
    assert [one["step"] for one in found] == [0, STEPS]
    for one in found:
        last = {span: place for place, span in enumerate(one["spans"]) if span >= 0}
        for place, span in enumerate(one["spans"]):
            assert (one["gap"][place] is None) == (span < 0)
            assert (one["teacher_logprobs"][place] is None) == (span < 0 or last[span] != place)
            if span >= 0:
                together = [number for number, other in enumerate(one["spans"]) if other == span]
                gap = one["teacher_logprobs"][last[span]] - sum(one["student_logprobs"][number] for number in together)
                assert one["gap"][place] == pytest.approx(gap, abs=1e-4)
        packed = pack_rollout(one, TokenTable())
        assert packed is not None
        gaps = [abs(one["gap"][place]) for place in last.values()]
        assert packed.abs_gap == pytest.approx(sum(gaps) / len(gaps), rel=1e-3)  # each span once


def test_the_doctor_says_what_happens(pair: dict[str, Any], tmp_path: Path) -> None:
    found = list(examine_recipe(make_config(pair), tmp_path / "run"))
    assert not [one for one in found if one.level == "fail"]
    [said] = [one for one in found if one.check == "vocabulary" and "student" in one.message]
    assert said.level == "warn"
    assert "spans of text are scored instead of tokens" in said.message
    assert any("the teacher reads '</s>' (id 2) there" in one.message for one in found if one.check == "stop ids")
    insisting = make_config({**pair, "teacher": {"tokenizer": "student"}})
    assert [one.check for one in examine_recipe(insisting, tmp_path / "run") if one.level == "fail"][:1] == ["vocabulary"]


@pytest.mark.parametrize("dialect", ["iwopd", "vllm"])
def test_a_served_teacher_whose_model_is_not_readable_here(
    pair: dict[str, Any], trained_run: Path, tmp_path: Path, dialect: str
) -> None:
    folder = pair["models"]["teacher"]
    with served(load_model(folder).eval(), vocab_size=len(trained("sentencepiece-bpe", 520))) as server:
        teacher = {"urls": [server.url], "dialect": dialect, "tokenizer": folder, "name": "m"}
        settings = {**pair, "steps": 1, "models": {"student": pair["models"]["student"], "teacher": "m"}, "teacher": teacher}
        run_training(make_config(settings), tmp_path / "run", doctor=False)
    here, there = records(trained_run)[0], records(tmp_path / "run")[0]
    for name in ("gap/abs_mean", "loss", "spans/count", "spans/tokens", "spans/unscored"):
        assert here[name] == pytest.approx(there[name], rel=1e-3), name


def test_what_needs_distributions_is_refused_before_weights_are_read(pair: dict[str, Any], tmp_path: Path) -> None:
    models = {}
    for name in ("student", "teacher"):
        models[name] = str(tmp_path / name)
        (tmp_path / name).mkdir()
        for file in Path(pair["models"][name]).iterdir():
            if file.suffix != ".safetensors":
                (tmp_path / name / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match="the teacher has another tokenizer than the student, but the method"):
        assemble(make_config({**pair, "models": models, "method": {"objective": "divergence"}}), print)


def test_identical_tokenizers_are_compared_and_nothing_else_happens(tmp_path: Path) -> None:
    settings = {**save_pair(tmp_path), "steps": 2, "tracking": {"console": "off"}}
    weights, metrics = [], []
    for setting in ("auto", "student"):
        given = make_config({**settings, "teacher": {"tokenizer": setting}})
        assert not isinstance(assemble(given, print).teacher_scorer, ForeignScorer)
        run_training(given, tmp_path / setting, doctor=False)
        weights.append(load_file(tmp_path / setting / "checkpoints" / "step-000002" / "model" / "model.safetensors"))
        timed = ("time/", "throughput/")
        metrics.append([{k: v for k, v in one.items() if not k.startswith(timed)} for one in records(tmp_path / setting)])
    assert metrics[0] == metrics[1]
    assert not any(name.startswith("spans/") for name in metrics[0][0])
    assert all(torch.equal(values, weights[1][name]) for name, values in weights[0].items())


def test_kept_scores_are_counted_and_servers_room_is_known(pair: dict[str, Any], tmp_path: Path) -> None:
    with assemble(make_config({**pair, "teacher": {"cache": str(tmp_path / "cache")}}), lambda _: None) as parts:
        assert isinstance(parts.teacher_scorer, ForeignScorer)
        assert [type(one) for one in parts.caches] == [CachedScorer]
    folder = pair["models"]["teacher"]
    with served(load_model(folder).eval(), vocab_size=len(trained("sentencepiece-bpe", 520))) as server:
        teacher = {"urls": [server.url], "name": "m", "tokenizer": folder, "cache": str(tmp_path / "cache")}
        with assemble(make_config({**pair, "teacher": teacher}), lambda _: None) as parts:
            assert isinstance(parts.teacher_scorer, ForeignScorer)
            assert parts.teacher_scorer.reader.room == load_model(folder).config.max_position_embeddings


def test_a_tokenizer_that_is_not_the_local_teachers_is_refused(pair: dict[str, Any], tmp_path: Path) -> None:
    config = make_config({**pair, "teacher": {"tokenizer": pair["models"]["student"]}})
    words = "teacher.tokenizer is .*student', but the teacher is loaded here and brings another one .*leave teacher"
    [said] = [one for one in examine_recipe(config, tmp_path / "run") if one.check == "files" and one.level == "fail"]
    assert re.search(words, said.message)
    assert said.remedy == "correct teacher.tokenizer"
    with pytest.raises(ConfigError, match=words):
        assemble(config, lambda _: None)
    same = make_config({**pair, "teacher": {"tokenizer": pair["models"]["teacher"]}})
    with assemble(same, lambda _: None) as parts:
        assert isinstance(parts.teacher_scorer, ForeignScorer)


def test_the_self_check_of_a_served_teacher_compares_with_a_copy_that_reads_the_same(pair: dict[str, Any]) -> None:
    with served(load_model(pair["models"]["teacher"]).eval(), vocab_size=len(trained("sentencepiece-bpe", 520))) as server:
        config = make_config({**pair, "teacher": {"urls": [server.url], "name": "m"}})
        with assemble(config, lambda _: None) as parts:
            found = {one.check: one for one in examine_pipeline(config, parts)}
    assert found["self loss"].level == "pass", found["self loss"].message
    assert "the loss is the same" in found["self loss"].message


OWN_TEMPLATE = "{% for m in messages %}Q: {{ m['content'] }}{% if hint %} ({{ hint }}){% endif %} A:{% endfor %}"


def test_prompts_are_shown_as_the_teacher_sees_them(pair: dict[str, Any], tmp_path: Path) -> None:
    """Its own template, or the file that the settings name: also for a tokenizer that has none."""
    bare, file = tmp_path / "bare", tmp_path / "own.jinja"
    tokenizer = load_tokenizer(pair["models"]["teacher"])
    tokenizer.chat_template = None
    load_model(pair["models"]["teacher"]).save_pretrained(bare)
    tokenizer.save_pretrained(bare)
    file.write_text(OWN_TEMPLATE)
    own = {"chat_template": str(file), "chat_template_kwargs": {"hint": "short"}}
    config = make_config({**pair, "steps": 1, "models": {**pair["models"], "teacher": str(bare)}, "teacher": own, "eval": {}})
    found = list(examine_recipe(config, tmp_path / "run"))
    assert [one.message for one in found if one.level == "fail"] == []
    assert not [one for one in found if one.check == "template names"]
    [said, *_] = [one.message for one in found if one.check == "rendering"]
    assert "; the teacher's: 28 ids, 'Q: What is 0 plus 3? (short) A:'" in said
    run_training(config, tmp_path / "run", doctor=False)
    shown = json.loads((tmp_path / "run" / "prompts.json").read_text())["examples"][0]
    assert shown["teacher"]["text"] == "Q: What is 0 plus 3? (short) A:"
    without = make_config({**pair, "models": {**pair["models"], "teacher": str(bare)}})
    [lacking] = [one for one in examine_recipe(without, tmp_path / "run") if one.check == "chat template"]
    assert (lacking.level, "teacher.chat_template" in lacking.remedy) == ("fail", True)


def test_a_teacher_that_can_read_nothing_of_the_answers_is_refused_in_words(tmp_path: Path) -> None:
    """It knows the prompts' digits; the student, which is random, writes all bytes."""
    save_byte_model(tmp_path / "student")
    make_model("qwen3").save_pretrained(tmp_path / "teacher")
    build_tokenizer().save_pretrained(tmp_path / "teacher")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "1", "prompt": "1+2"}) + "\n")
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    tree = {
        "steps": 1,
        "models": {"student": str(tmp_path / "student"), "teacher": str(tmp_path / "teacher")},
        "data": {"prompts": str(tmp_path / "prompts.jsonl"), "chat_template": str(tmp_path / "plain.jinja")},
        "rollout": {"prompts_per_step": 1, "max_tokens": 2},
        "tracking": {"console": "off"},
    }
    with pytest.raises(DoctorError, match="can read nothing of the student's answers"):
        run_training(make_config(tree), tmp_path / "run")
    with pytest.raises(TrainingStoppedError, match="can write nothing of the answers of step 1"):
        run_training(make_config(tree), tmp_path / "run", doctor=False)
