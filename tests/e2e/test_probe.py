"""`iwopd probe` on random pairs: everything at once, what is left when something is missing, and clear words for bad input."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from iwopd.algo.drift_weights import gate
from iwopd.analysis.probe.alignment import TokenGradients
from iwopd.analysis.probe.result import Probe, read_probe
from iwopd.cli import add_command
from iwopd.errors import UserError
from iwopd.tiny import build_tokenizer, task
from models import make_model, save_byte_model, save_pair

Run = Callable[..., Probe]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Student, teacher, and prompts with and without answers and solutions."""
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder, prompts=12)
    expressions = ["1+2*3", "4*5+6", "7-2*2", "3+3*3", "9-1*4", "2*2+5", "8+1*6", "6-3*2"]
    records = [
        {"id": text, "prompt": text, "answer": task.answer(text), "solution": task.right_solution(text)} for text in expressions
    ]
    (folder / "solved.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def call(*words: str | Path) -> None:
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers(dest="command", required=True), "probe")
    options = parser.parse_args(["probe", *(str(word) for word in words)])
    assert options.run(options, []) == 0


@pytest.fixture
def run(pair: Path, tmp_path: Path) -> Run:
    def attempt(*words: str | Path, student: Path | None = None, teacher: Path | None = None) -> Probe:
        models = ("--student", student or pair / "student", "--teacher", teacher or pair / "teacher")
        call(*models, *words, "-o", tmp_path / "out.json")
        return read_probe(tmp_path / "out.json")

    return attempt


SKIPPED = ("--skip", "handoff,horizons,agreement")


def test_a_probe_that_was_stopped_goes_on(
    run: Run, pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--prompts", pair / "solved.jsonl", "--limit", "2", "--max-tokens", "8", "--batches", "1", *SKIPPED)
    original, passes = TokenGradients.of, 0

    def stopped(self: TokenGradients, coefficients: torch.Tensor) -> list[torch.Tensor]:
        nonlocal passes
        passes += 1
        if passes == 5:  # the way to the solutions, and three updates
            raise KeyboardInterrupt
        return original(self, coefficients)

    monkeypatch.setattr(TokenGradients, "of", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(*words)
    (announced,) = re.findall(r"alignment: up to (\d+) passes with gradients \(", capsys.readouterr().err)
    again = run(*words)
    said = capsys.readouterr().err
    assert "going on with a probe that was stopped: 2 rollouts, 3 cosines" in said
    assert "passes with gradients, 3 of which were there already" in said
    assert passes == 5 + int(announced) - 3
    assert not (tmp_path / "out.json.parts").exists()
    whole = run(*words)
    assert again.model_copy(update={"seconds": {}}) == whole.model_copy(update={"seconds": {}})


def test_what_was_kept_of_another_probe_is_not_used(
    run: Run, pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words: tuple[str | Path, ...] = ("--prompts", pair / "solved.jsonl", "--limit", "2", "--max-tokens", "8")
    with monkeypatch.context() as stopped:

        def stop(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        stopped.setattr("iwopd.analysis.probe.run.score_tokens", stop)
        with pytest.raises(KeyboardInterrupt):
            run(*words, "--skip", "handoff")
    assert (tmp_path / "out.json.parts" / "rollouts.json").is_file()
    capsys.readouterr()
    found = run(*words, "--seed", "1", "--skip", "handoff,alignment,horizons")
    assert "going on" not in capsys.readouterr().err
    assert found.settings["seed"] == 1


def test_everything_at_once(run: Run, pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--max-tokens", "16", "--samples", "2", "--continuations", "2", "--batches", "3", "--gamma", "1.5", "--json")
    found = run("--prompts", pair / "solved.jsonl", "--task", "tiny", *options)
    printed = capsys.readouterr()
    assert Probe.model_validate_json(printed.out) == found
    assert "Verdict" in printed.err
    assert found.missing == {}
    assert (found.rollouts.prompts, found.rollouts.rollouts, found.task) == (8, 16, "tiny")
    assert found.handoff is not None
    assert found.handoff.problems == 8
    assert len(found.handoff.teacher.mean) == len(found.handoff.fractions) == 7
    assert found.positions is not None
    assert sum(value or 0.0 for value in found.positions.share.mean) == pytest.approx(1.0)
    kl = found.positions.kl
    assert all((low or 0.0) <= (mean or 0.0) <= (high or 0.0) for low, mean, high in zip(kl.low, kl.mean, kl.high, strict=True))
    assert found.overlap is not None
    assert found.likelihood is not None
    assert found.likelihood.difference.mean is not None
    assert found.likelihood.difference.mean < 0  # the student likes its own answers best
    assert found.rules is not None
    assert found.alignment is not None
    assert (found.alignment.batches, found.alignment.batch_prompts) == (3, 2)
    assert [rule.key for rule in found.alignment.rules] == [rule.key for rule in found.rules.rules]
    assert "iw-opd-1.5" in [rule.key for rule in found.rules.rules]
    assert all(-1 <= (rule.cosine.mean or 0.0) <= 1 for rule in found.alignment.rules)
    assert found.bias != "unmeasurable"
    assert found.settings["gamma"] == 1.5
    keys = [rule.key for rule in found.rules.rules]
    assert {"power", "baseline", "clipped", "log-mix", "teacher-entropy", "tip", "prune", "sod", "rising", "scope"} <= set(keys)
    assert {"until-drift", "survival-share", "gated"} <= set(keys)
    assert found.agreement is not None
    assert (found.agreement.batches, found.agreement.batch_prompts) == (3, 2)
    assert -1 <= (found.agreement.cosine.mean or 0.0) <= 1
    assert "tokens after a drift" in " ".join(found.verdict)
    assert (found.alignment.verdicts == []) == (found.alignment.compared == 0)
    assert found.horizons is not None
    assert found.horizons.horizons[0].key == "full"
    assert [one.key for one in found.horizons.horizons[-1].methods] == ["opd", "survival"]
    assert found.horizons.proposal is not None
    assert found.horizons.proposal.words in " ".join(printed.err.split())
    full = next(rule for rule in found.alignment.rules if rule.key == "opd")
    whole = found.horizons.horizons[0].of("opd")
    assert whole is not None
    assert whole.solutions is not None
    assert whole.solutions.mean == pytest.approx(full.cosine.mean, abs=1e-5)  # the same update, measured twice


def test_the_same_seed_gives_the_same_numbers(run: Run, pair: Path) -> None:
    options = ("--prompts", pair / "solved.jsonl", "--task", "tiny", "--max-tokens", "12", "--skip", "rules,overlap,horizons")
    fewer = ("--limit", "4", "--batches", "2", "--continuations", "1")
    first, again, other = run(*options, *fewer), run(*options, *fewer), run(*options, *fewer, "--seed", "1")
    same = {"seconds": {}}
    assert first.model_copy(update=same) == again.model_copy(update=same)
    assert first.positions != other.positions
    assert first.missing == dict.fromkeys(("overlap", "rules", "horizons"), "left out with --skip")


def test_without_answers_and_solutions(run: Run, pair: Path) -> None:
    found = run("--prompts", pair / "prompts.jsonl", "--max-tokens", "12", "--limit", "6")
    assert found.missing.keys() == {"handoff", "alignment"}
    assert found.agreement is not None  # it needs neither
    assert found.horizons is not None
    assert all(one.solutions is None for one in found.horizons.horizons[0].methods)
    assert "add the field 'answer'" in found.missing["handoff"]
    assert "'solution'" in found.missing["alignment"]
    assert found.positions is not None
    assert found.rollouts.prompts == 6
    assert any("checker" in sentence for sentence in found.verdict)
    assert found.rules is not None
    assert "scope" not in [rule.key for rule in found.rules.rules]
    assert any("SCOPE" in note and "nobody judges the rollouts" in note for note in found.notes)


def test_pairs_whose_gradients_cannot_be_compared(run: Run, pair: Path, tmp_path: Path) -> None:
    capped = tmp_path / "capped"
    make_model("gemma2", seed=3).save_pretrained(capped)
    build_tokenizer().save_pretrained(capped)
    skipped = ("--skip", "handoff,alignment,horizons,likelihood,overlap")
    options = ("--prompts", pair / "prompts.jsonl", "--max-tokens", "8", "--limit", "4", *skipped)
    found = run(*options, teacher=capped)
    assert found.agreement is None
    assert "more than a matrix" in found.missing["agreement"]
    found = run(*options, teacher=pair / "student")
    assert "the rollouts lose nothing under the teacher" in found.missing["agreement"]
    assert found.rules is not None
    assert run(*options[:-1], skipped[1] + ",agreement").missing["agreement"] == "left out with --skip"


def test_a_task_brings_problems_checker_and_solutions(run: Run, tmp_path: Path) -> None:
    (tmp_path / "digits.toml").write_text('checker = "exact"\nfile = "digits.jsonl"\nmax_tokens = 8\n')
    records = [{"id": f"d{i}", "problem": f"{i}+{i}", "answer": str(i), "solution": str(2 * i % 10)} for i in range(6)]
    (tmp_path / "digits.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = run("--task", tmp_path / "digits.toml", "--limit", "4", "--continuations", "1", "--batches", "2", "--bins", "2")
    assert found.missing == {}
    assert found.task == "digits"
    assert found.settings["max_tokens"] == 8
    assert found.handoff is not None
    assert found.handoff.problems == 4
    assert found.alignment is not None


def test_answers_to_some(run: Run, tmp_path: Path) -> None:
    """Half with answers, checked as math; a quarter with solutions."""
    records = [{"prompt": f"{i}+1"} | ({"answer": str(i + 1)} if i % 2 else {}) for i in range(8)]
    records[1]["solution"] = records[3]["solution"] = "1+1=2;2"
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = run("--prompts", tmp_path / "some.jsonl", "--max-tokens", "8", "--continuations", "1", "--fractions", "0,0.5")
    assert found.missing == {}
    assert found.handoff is not None
    assert found.handoff.problems == 4
    assert found.alignment is not None
    assert (found.alignment.batches, found.alignment.batch_prompts) == (2, 1)
    assert any("4 of 8 prompts have no answer" in note for note in found.notes)


def constant_model(folder: Path, source: Path, token: int) -> Path:
    """A model that next to always says one token: its last norm is switched off but for what the output matrix likes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(source)
    model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
    model.config.tie_word_embeddings = False
    with torch.no_grad():
        # Hidden states have length sqrt(H); a row along their mean direction would do, but the sign may differ. So make the
        # final norm blind: one coordinate counts, its input is the constant embedding of every id.
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight[token, 0] = 10.0
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def test_rollouts_that_are_all_empty(run: Run, pair: Path, tmp_path: Path) -> None:
    silent = constant_model(tmp_path / "silent", pair / "student", 1)
    found = run("--prompts", pair / "solved.jsonl", "--task", "tiny", "--continuations", "1", student=silent)
    assert found.rollouts.empty == found.rollouts.rollouts == 8
    assert found.missing.keys() == {"positions", "overlap", "likelihood", "rules", "alignment", "agreement", "horizons"}
    assert all("all rollouts are empty" in reason for reason in found.missing.values())
    assert found.handoff is not None
    assert found.handoff.student is not None
    assert found.handoff.student.mean == 0.0


def test_rollouts_that_are_all_cut_off(run: Run, pair: Path, tmp_path: Path) -> None:
    endless = constant_model(tmp_path / "endless", pair / "student", 5)
    found = run(
        *("--prompts", pair / "solved.jsonl", "--task", "tiny", "--max-tokens", "10", "--continuations", "1"), student=endless
    )
    assert found.rollouts.truncated == found.rollouts.rollouts == 8
    assert any("cut off at --max-tokens 10" in note and "Raise" in note for note in found.notes)
    assert found.missing.keys() == {"agreement"}  # a student that is certain of every token has no gradient
    assert "the student is certain of all its tokens" in found.missing["agreement"]
    assert found.handoff is not None
    assert found.handoff.student is None
    assert found.positions is not None


def test_one_prompt(run: Run, pair: Path) -> None:
    found = run("--prompts", pair / "solved.jsonl", "--task", "tiny", "--limit", "1", "--max-tokens", "8", "--samples", "4")
    assert "one prompt: there are no intervals" in found.notes
    assert found.positions is not None
    assert found.positions.mean_kl.mean is not None
    assert found.positions.mean_kl.low is None
    assert found.alignment is not None
    assert found.alignment.batches == 1


def test_bad_input_gets_clear_words(run: Run, pair: Path, tmp_path: Path) -> None:
    prompts = ("--prompts", pair / "prompts.jsonl")

    def refused(*words: str | Path, **models: Path) -> str:
        with pytest.raises(UserError) as error:
            run(*words, **models)
        return str(error.value)

    assert "--max-tokens is needed" in refused(*prompts)
    assert "looks at 22 likely ids (k), but the vocabulary has 21" in refused(
        *prompts, "--max-tokens", "8", "--rule", "prune:k=22"
    )
    assert "name a file with --prompts or a --task" in refused("--max-tokens", "8")
    assert "--fractions must lie in" in refused(*prompts, "--fractions", "0,1.5")
    assert "--fractions should look like" in refused(*prompts, "--fractions", "a")
    assert "the parts are" in refused(*prompts, "--skip", "everything")
    assert "--limit must be at least 1" in refused(*prompts, "--limit", "0")
    assert "unknown task 'tinny'" in refused(*prompts, "--task", "tinny")
    assert "checks its own problems only" in refused("--prompts", pair / "solved.jsonl", "--task", "humaneval+")
    assert "--data is a task's file" in refused(*prompts, "--data", pair / "prompts.jsonl")
    assert "there is no such folder" in refused(*prompts, "--max-tokens", "8", student=tmp_path / "nowhere")
    assert "cannot read prompts" in refused("--prompts", tmp_path / "nowhere.jsonl", "--max-tokens", "8")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1", "solution": 3}\n')
    assert "line 1: 'solution' must be a text" in refused("--prompts", tmp_path / "bad.jsonl", "--max-tokens", "8")
    stranger = save_byte_model(tmp_path / "stranger")
    assert "their tokenizers differ" in refused(*prompts, "--max-tokens", "8", teacher=stranger)
    small = tmp_path / "small"
    make_model("qwen3", vocab=16).save_pretrained(small)
    assert "the teacher's output matrix 16 rows" in refused(*prompts, "--max-tokens", "8", teacher=small)
    with pytest.raises(UserError, match="leave --task out"):
        call("--world", "clean", "--task", "tiny")
    with pytest.raises(UserError, match="unknown world 'dirty'"):
        call("--world", "dirty")
    with pytest.raises(UserError, match="--student and --teacher"):
        call("--student", "x")


@pytest.mark.slow
def test_the_embedded_world_shows_what_horizons_keep(tmp_path: Path) -> None:
    """Survival's update hardly notices that answers stop where its weights are small; plain OPD's does."""
    parts = ("--skip", "handoff,overlap,likelihood,rules,alignment")
    call("--world", "clean", "--limit", "64", "--batch-size", "16", "--batches", "4", *parts, "-o", tmp_path / "probe.json")
    found = read_probe(tmp_path / "probe.json").horizons
    assert found is not None
    rows = {row.key: row for row in found.horizons}
    drift = rows["drift-0.05"]
    assert 0.15 < (drift.written.mean or 0.0) < 0.5
    survival, plain = drift.of("survival"), drift.of("opd")
    assert survival is not None
    assert plain is not None
    assert (survival.in_batch.mean or 0.0) > 0.99
    assert (plain.in_batch.mean or 1.0) < 0.95


@pytest.mark.slow
def test_the_embedded_world_tells_where_tokens_after_a_drift_pull(tmp_path: Path) -> None:
    """How strongly is a property of the trained pair, which another processor trains to other weights: no sign is asked for."""
    parts = ("--skip", "handoff,positions,overlap,likelihood,rules,alignment,horizons")
    call("--world", "clean", "--limit", "256", *parts, "-o", tmp_path / "probe.json")
    found = read_probe(tmp_path / "probe.json")
    assert found.agreement is not None
    assert (found.agreement.batches, found.agreement.batch_prompts) == (8, 32)
    low, mean, high = found.agreement.cosine.low, found.agreement.cosine.mean, found.agreement.cosine.high
    assert low is not None
    assert mean is not None
    assert high is not None
    assert -1 <= low < mean < high <= 1
    assert found.agreement.gate == pytest.approx(gate(mean))
