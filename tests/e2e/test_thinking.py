"""Thinking, from prompts to the loss: a tiny pair whose template has a thinking mode trains with each option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from iwopd.cli import main
from iwopd.config import Config, config_toml, load_config, make_config
from iwopd.runs.directory import RunDirectory
from iwopd.runs.logs import RunError
from iwopd.tiny import build_tokenizer
from iwopd.train.assembly import assemble
from iwopd.train.doctor import examine_recipe
from iwopd.train.loop import take_step
from iwopd.train.run import run_training
from iwopd.train.scoring import score_step, write_rollouts
from iwopd.train.state import TrainingStoppedError
from models import make_model, save_pair

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}?"
    "{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}{% endif %}"
)
OPENING, CLOSING, END = 21, 22, 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two random models of 23 ids: one answer in a few closes its block before it ends."""
    folder = tmp_path_factory.mktemp("thinking")
    settings = save_pair(folder, prompts=16)
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = TEMPLATE
    assert tokenizer.convert_tokens_to_ids(["<think>", "</think>"]) == [OPENING, CLOSING]
    for name, seed in (("student", 1), ("teacher", 2)):
        make_model("qwen3", seed=seed, vocab=23).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    problems = [{"id": f"e{n}", "problem": f"{n}+1", "answer": str(n + 1)} for n in range(8)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(one) + "\n" for one in problems))
    (folder / "sums.toml").write_text(tomli_w.dumps({"file": "problems.jsonl", "checker": "exact", "samples": 1}))
    settings["data"] |= {"chat_template_kwargs": {"enable_thinking": True}}
    evaluation = {"tasks": [str(folder / "sums.toml")], "every": 2, "prompts": 8}
    return {**settings, "steps": 2, "rollout": {"prompts_per_step": 16, "max_tokens": 24}, "eval": evaluation}


def choose(pair: dict[str, Any], thinking: str, **sections: Any) -> Config:
    merged = {name: {**pair.get(name, {}), **values} for name, values in sections.items()}
    return make_config({**pair, **merged, "rollout": {**pair["rollout"], "thinking": thinking, **sections.get("rollout", {})}})


def by_hand(ids: list[int]) -> list[bool]:
    """The prompt has opened a block. A closing tag ends it; one without an opening makes all before it thinking."""
    thinking, found = True, []
    for number in ids:
        if number == CLOSING and not thinking:
            found = [True] * len(found)
        thinking = thinking or number == OPENING
        found.append(thinking or number == CLOSING)
        thinking = thinking and number != CLOSING
    return found


@pytest.mark.parametrize("thinking", ["keep", "mask", "only"])
def test_each_option_trains_on_its_part(thinking: str, pair: dict[str, Any], tmp_path: Path) -> None:
    """The loss by hand: minus the mean of weight times gap over the tokens that are left, weights among those alone."""
    config = choose(pair, thinking)
    with assemble(config, lambda _: None) as parts:
        written = write_rollouts(config, parts, 1)
        scored = score_step(config, parts, written, 1)
        total = tokens = thought = 0.0
        first = 0
        for rollout in written.rollouts:
            assert rollout.prompt.token_ids[-1] == OPENING
            assert rollout.prompt.begun == "<think>"
            inside = by_hand(rollout.response_ids.tolist())
            thought += sum(inside)
            places = [n for n, block in enumerate(inside) if thinking == "keep" or block == (thinking == "only")]
            gaps = [float(scored.batch.teacher_logprobs[first + n] - scored.batch.old_logprobs[first + n]) for n in places]
            first += len(rollout)
            whole = sum(abs(gap) for gap in gaps[:-1])
            for n, gap in enumerate(gaps):
                spent = sum(abs(one) for one in gaps[:n]) / whole if whole else 0.0
                total -= gap * (1.5 - 0.5 * spent)
            tokens += len(places)
        assert 0 < thought < first
        assert {len(set(by_hand(rollout.response_ids.tolist()))) for rollout in written.rollouts} == {1, 2}
        stats = take_step(config, parts, RunDirectory(tmp_path), 1)
    assert stats.tokens == tokens
    assert stats.loss == pytest.approx(total / tokens, rel=1e-4)
    assert stats.metrics["rollout/thinking"] == pytest.approx(thought / first)
    assert stats.metrics["tokens_written"] == first


def test_a_run_with_thinking_is_evaluated_with_thinking(
    pair: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps, evaluations, the kept prompts and rollouts; then `iwopd eval` of the run renders as the run did."""
    config = choose(pair, "mask")
    run_training(config, tmp_path / "run", doctor=False)
    run = RunDirectory(tmp_path / "run")
    assert [record["step"] for record in run.read("evals.jsonl")] == [0, 2]
    for record in run.read("rollouts.jsonl"):
        assert record["prompt"].endswith("?<think>")
        inside = by_hand(record["token_ids"])
        assert [weight == 0 for weight in record["weights"]] == inside
    kept = json.loads((tmp_path / "run" / "prompts.json").read_text())
    assert kept["chat_template"] == TEMPLATE
    assert kept["chat_template_kwargs"] == {"enable_thinking": True}
    assert len(kept["examples"]) == 3
    assert all(one["text"].endswith("?<think>") and "teacher" not in one for one in kept["examples"])
    words = [
        "eval",
        "--model",
        str(tmp_path / "run"),
        "--tasks",
        pair["eval"]["tasks"][0],
        "--max-tokens",
        "12",
        "--limit",
        "2",
    ]
    for more, thinking in (([], True), (["--no-thinking"], False)):
        out = tmp_path / f"eval-{thinking}"
        with pytest.raises(SystemExit) as end:
            main([*words, "--out", str(out), *more])
        assert not end.value.code, capsys.readouterr().err
        assert json.loads((out / "eval.json").read_text())["settings"]["thinking"] is thinking
    off = choose(pair, "mask", eval={"chat_template_kwargs": {"enable_thinking": False}})
    with assemble(off, lambda _: None) as parts:
        assert {prompt.text.rpartition("?")[2] for prompt in parts.tasks[0].prompts} == {"<think></think>"}
        assert {prompt.text.rpartition("?")[2] for prompt in parts.order.prompts} == {"<think>"}


def test_a_step_without_anything_to_train_on_ends_with_words(pair: dict[str, Any], tmp_path: Path) -> None:
    short = choose(pair, "mask", rollout={"max_tokens": 1, "thinking": "mask"}, eval={"prompts": 0})
    with pytest.raises(TrainingStoppedError, match=r"every rollout of the step is thinking to its last token"):
        run_training(short, tmp_path / "run", doctor=False)


def test_a_template_file_is_needed_once(pair: dict[str, Any], tmp_path: Path) -> None:
    """A run goes on without the file; with a changed one it is refused, and the place is shown."""
    file, recipe, folder = tmp_path / "mine.jinja", tmp_path / "recipe.toml", tmp_path / "run"
    file.write_text(TEMPLATE.replace("'content'] }}", "'content'] }}+0") + "{#" + 400 * "-" + "#}")
    data = {**pair["data"], "chat_template": str(file), "prefill": "1"}
    teacher = {"chat_template_kwargs": {"enable_thinking": False}}
    recipe.write_text(tomli_w.dumps({**pair, "data": data, "teacher": teacher, "steps": 1, "eval": {"prompts": 0}}))
    run_training(load_config(recipe), folder, doctor=False)
    examples = json.loads((folder / "prompts.json").read_text())["examples"]
    assert all(one["text"].endswith("+0?<think>1") for one in examples)
    assert all(one["teacher"]["text"].endswith("+0?<think></think>1") for one in examples)
    assert all(one["teacher"]["ids"] == one["ids"] + 1 for one in examples)
    file.write_text(file.read_text().replace("+0", "+1"))
    with pytest.raises(RunError, match=r"data\.chat_template: another text from letter 43 on.*\+0.*\+1"):
        run_training(load_config(recipe), folder, resume=True, doctor=False)
    file.unlink()
    saved = load_config(folder / "config.toml", {"steps": 2}, saved=True)
    assert run_training(saved, folder, resume=True, doctor=False).step == 2


def lines(config: Config, folder: Path) -> list[str]:
    return [finding.text() for finding in examine_recipe(config, folder / "run", static=True)]


def test_the_doctor_shows_prompts_and_says_what_is_wrong(pair: dict[str, Any], tmp_path: Path) -> None:
    said = lines(choose(pair, "mask", teacher={"chat_template_kwargs": {"enable_thinking": False}}), tmp_path)
    assert "pass  thinking        the student's template has a thinking mode; prompts are rendered with thinking on" in said
    shown = [line for line in said if line.startswith("pass  rendering")]
    assert len(shown) == 3
    assert all("?<think>'; the teacher's: " in line and line.endswith("?<think></think>'") for line in shown)
    assert any(line.startswith("pass  chat template   the teacher sees its own rendering") for line in said)
    said = lines(choose(pair, "keep", teacher={"chat_template": TEMPLATE.replace("?", "?=")}), tmp_path)
    assert any("the teacher sees the rendering that [teacher] describes, which is not its own" in line for line in said)
    wrong = {"chat_template_kwargs": {"enable_thinking": True, "enable_thoughts": True}}
    (unknown,) = [line for line in lines(choose(pair, "keep", data=wrong), tmp_path) if "template names" in line]
    assert "data.chat_template_kwargs gives 'enable_thoughts', which the chat template does not ask for" in unknown
    assert "It knows enable_thinking" in unknown
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    (warned,) = [line for line in lines(choose(pair, "only", data=off), tmp_path) if line.startswith("warn  thinking")]
    assert "rollout.thinking is 'only', but the student's template has a thinking mode; prompts are rendered with" in warned
    plain = {"chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}?", **off}
    said = lines(choose(pair, "mask", data=plain), tmp_path)
    assert any("has no thinking mode: answers may have no thinking blocks" in line for line in said)
    assert any("gives 'enable_thinking', which the chat template does not ask for. It knows no names" in line for line in said)
    said = lines(choose(pair, "mask", data={**plain, "prefill": "<think>1"}), tmp_path)
    assert not any(line.startswith("warn  thinking") for line in said)  # the prefill opens a block


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"data": {"prefill": "1<eos>"}}, "the prefill '1<eos>' holds the special token '<eos>'"),
        ({"data": {"chat_template": "{{ raise_exception('never') }}"}}, "data.chat_template renders no user message: the chat"),
        ({"data": {"chat_template": "{{ messages[5].content }}"}}, "data.chat_template renders no user message"),
        ({"teacher": {"chat_template": "{{ 1 / 0 }}"}}, "teacher.chat_template renders no user message"),
        (
            {"teacher": {"others": {"x": {"urls": ["http://gpu1:8000"], "chat_template": "{{ 1 / 0 }}"}}}},
            "teacher.others.x.chat_template renders no user message",
        ),
    ],
)
def test_what_cannot_be_rendered_is_refused_before_models_are_loaded(
    sections: dict[str, Any], words: str, pair: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = choose(pair, "keep", **sections)
    failed = [line for line in lines(config, tmp_path) if line.startswith("fail")]
    assert any(words in line for line in failed), failed
    monkeypatch.setattr("iwopd.train.assembly.load_student", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=r"prefill|chat_template"):
        assemble(config, lambda _: None)


def test_defaults_render_as_ever(pair: dict[str, Any]) -> None:
    """Thinking is off unless somebody switches it on, whatever the run directory says besides."""
    config = make_config({**pair, "data": {"prompts": pair["data"]["prompts"]}, "eval": {"prompts": 0}})
    assert 'thinking = "keep"' in config_toml(config)
    with assemble(config, lambda _: None) as parts:
        assert {prompt.text.rpartition("?")[2] for prompt in parts.order.prompts} == {"<think></think>"}
        assert {prompt.begun for prompt in parts.order.prompts} == {""}
        assert parts.thinking is None
        evidence = score_step(config, parts, write_rollouts(config, parts, 1), 1).evidence
        assert torch.equal(evidence.mask, evidence.old_logprobs != 0)


@pytest.mark.parametrize(("thinking", "taught"), [("keep", 6), ("mask", 3), ("only", 3)])
def test_answers_of_others_are_masked_like_the_students(
    pair: dict[str, Any], tmp_path: Path, thinking: str, taught: int
) -> None:
    records = [json.loads(line) for line in Path(pair["data"]["prompts"]).read_text().splitlines()]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({**one, "solution": "12</think>34"}) + "\n" for one in records))
    mix = {"share": 1.0, "field": "solution"}
    config = choose(pair, thinking, data={**pair["data"], "prompts": str(file)}, rollout={"mix": mix})
    with assemble(config, lambda _: None) as parts:
        stats = take_step(config, parts, RunDirectory(tmp_path / "run"), 1)
    assert stats.tokens == 16 * taught  # the prompt has opened the block: 1, 2, its end; 3, 4, the end of the answer
    assert stats.metrics["mix/token_share"] == 1
    assert stats.loss == pytest.approx(stats.metrics["mix/loss"])
    assert stats.loss == pytest.approx(-stats.metrics["mix/logprob"])
