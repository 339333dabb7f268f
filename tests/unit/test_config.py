from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from iwopd.cli import main
from iwopd.commands.options import parse_overrides
from iwopd.config import ConfigError, config_toml, differences, load_config, make_config, settings
from iwopd.demo import tiny_settings
from iwopd.methods import METHODS, TITLES

RECIPES = Path(__file__).parents[2] / "src" / "iwopd" / "recipes"


def test_every_recipe_loads_and_differs_in_the_method_only() -> None:
    names = {path.stem for path in (RECIPES / "tiny").glob("*.toml")}
    assert names == set(METHODS) == set(TITLES)
    for name in names:
        config = load_config(RECIPES / "tiny" / f"{name}.toml")
        assert config == make_config({**tiny_settings(), "method": METHODS[name]})


def test_the_defaults_are_the_papers() -> None:
    config = make_config({"models": {"world": "clean"}})
    assert (config.optim.lr, config.optim.betas, config.optim.weight_decay, config.optim.grad_clip) == (
        1e-5,
        (0.9, 0.999),
        0.01,
        1.0,
    )
    method = config.method.model_dump()
    assert (method["clip"], method["dual_clip"], method["correction_threshold"]) == (0.2, 3.0, 5.0)
    assert (method["entropy_coef"], method["kl_coef"]) == (0.0, 0.0)
    assert make_config({"models": {"world": "clean"}, "method": {"advantage": "exopd"}}).method.model_dump()["scale"] == 1.25
    assert (config.rollout.samples, config.rollout.temperature, config.rollout.top_p) == (1, 1.0, 1.0)
    assert (config.optim.ppo_epochs, config.optim.mini_batches, config.data.max_prompt_tokens) == (1, 1, 2048)
    assert config.rollout.truncated == "keep"
    assert not config.models.trust_remote_code


def test_overrides_and_round_trip(tmp_path: Path) -> None:
    overrides = parse_overrides(["--optim.lr", "1e-3", "--method.params={gamma = 2}", "--models.world", "drift", "--steps=3"])
    config = load_config(RECIPES / "tiny" / "iw-opd.toml", overrides)
    assert (config.optim.lr, config.method.params, config.models.world, config.steps) == (1e-3, {"gamma": 2}, "drift", 3)
    (tmp_path / "config.toml").write_text(config_toml(config))
    assert load_config(tmp_path / "config.toml") == config
    tomllib.loads(config_toml(config))
    again = load_config(RECIPES / "tiny" / "iw-opd.toml")
    changes = differences(again, config)
    assert changes["optim.lr"] == (0.0001, 0.001)
    assert len(changes) == 4
    assert set(differences(again, config, "place", "repeat")) == {"optim.lr", "method.params", "models.world"}


def test_dashes_stay_in_the_keys_that_users_choose() -> None:
    """`-` may stand for `_` in the name of a setting. A task or a teacher is called as its user calls it."""
    words = ["--eval.data.tiny-drift", "F", "--eval.data.my-x=G", "--optim.grad-clip", "2", "--method.params.prior-slope=0.1"]
    words += ["--teacher.others.my-x.urls", "['http://a:1']", "--teacher.others.my-x.max-in-flight", "3"]
    words += ["--teacher.others.a_b-c", "{model = 'm-n'}"]
    overrides = parse_overrides(words)
    assert overrides["method.params.prior_slope"] == 0.1  # a parameter is Python's, and has no dash
    config = load_config(RECIPES / "tiny" / "opd.toml", {n: v for n, v in overrides.items() if not n.startswith("method")})
    assert config.eval.data == {"tiny-drift": "F", "my-x": "G"}
    assert config.optim.grad_clip == 2
    assert config.teacher.others.keys() == {"my-x", "a_b-c"}
    assert (config.teacher.others["my-x"].max_in_flight, config.teacher.others["a_b-c"].model) == (3, "m-n")
    assert [parse_overrides([f"--{name}", "1"]) for name in ("eval-data.a-b", "eval.data", "seed")] == [
        {"eval_data.a_b": 1},
        {"eval.data": 1},
        {"seed": 1},
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optim": {"learning_rate": 1}}, "unknown setting 'optim.learning_rate'"),
        ({"optim": {"lrr": 1}}, "did you mean 'optim.lr'"),
        ({"method": {"lr": 1}}, "did you mean 'optim.lr'"),
        ({"optm": {"lr": 1}}, "did you mean 'optim.lr'"),
        ({"optim": {"lr": -1}}, r"optim.lr: must be above 0 \(given: -1\)"),
        ({"method": {"weights": "cumulative_share"}}, "did you mean 'cumulative-share'"),
        ({"method": {"weights": "uniform", "params": {"gamma": 1}}}, "weight rule 'uniform' has no parameter 'gamma'"),
        ({"models": {"world": None, "student": "x"}}, "give models.world, or both models.student and models.teacher"),
        ({"models": {"world": "clean", "student": "x"}}, "leave models.student and models.teacher out"),
        ({"models": {"student": "x", "teacher": "y"}}, "data.prompts must name a JSONL file"),
        ({"rollout": {"truncated": "cut"}}, "rollout.truncated: must be one of 'keep', 'mask' or 'drop'"),
    ],
)
def test_a_wrong_setting_is_answered_with_the_right_one(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config({"models": {"world": "clean"}, **values})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "no-such.toml"], "no recipe at no-such.toml"),
        (["train", str(RECIPES / "tiny" / "iw-opdd.toml")], "did you mean"),
        (["train", str(RECIPES / "tiny" / "opd.toml"), "--optim.lr"], "--optim.lr needs a value"),
        (["train", str(RECIPES / "tiny" / "opd.toml"), "fast"], "do not know what to do with 'fast'"),
        (["train", str(RECIPES / "tiny" / "opd.toml"), "--models.world", "wild"], "unknown world 'wild'"),
        (["demo", "--methods", "grpo"], "unknown method 'grpo'"),
        (["demo", "--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["demo", "--world", "wild"], "unknown world 'wild'"),
        (["train", str(RECIPES)], "is a folder, and neither a recipe nor a run directory"),
    ],
)
def test_the_command_line_answers_bad_input_with_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_help_lists_every_setting_and_methods_every_rule(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    for name, info in settings():
        assert f"--{name} " in text
        assert info.description
        assert info.description in text
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        main(["methods"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name in METHODS:
        assert name in text
    assert "sum_{k<t} |a[k]|" in text
    assert "needs: gap; beside log-probs: kl" in text
    assert max(map(len, text.splitlines())) <= 100


def test_methods_as_json_say_what_each_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["methods", "--json"])
    found = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    further = {one["name"]: one["beside_logprobs"] for kind in ("advantages", "rules") for one in found[kind]}
    assert (further["opd"], further["cumulative-share"], further["sod"]) == ([], [], [])
    assert (further["baseline"], further["tip"], further["scope"]) == (["kl"], ["student_entropy", "kl"], ["correct", "prompt"])
    known = {one["name"] for one in found["evidence"] if one["beside_logprobs"]}
    assert {name for names in further.values() for name in names} <= known
    assert all(one["formula"] and one["source"] for kind in ("advantages", "rules") for one in found[kind])
