"""The tokens that verl's agent loop asks for: checked before anything starts, and used with a tokenizer of Qwen's shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from iwopd.cluster.verl import launch
from iwopd.cluster.verl.checks import check_tokenizer
from iwopd.cluster.verl.errors import VerlError
from iwopd.cluster.verl.job import STAND_IN
from iwopd.cluster.verl.prompts import load_order, write_prompts
from iwopd.cluster.verl.translate import places, translate
from iwopd.cluster.verl.wiring import WIRED, check_wiring
from iwopd.config import Config, make_config
from iwopd.tiny import build_tokenizer
from qwen_shaped import TEMPLATE, qwen_tokenizer, save_qwen_model

MESSAGES = [{"role": "user", "content": "What is one and two?"}]


def config_of(folder: Path, *, end: str = "<|im_end|>", **sections: Any) -> Config:
    for name, seed in (("student", 1), ("teacher", 2)):
        save_qwen_model(folder / name, seed=seed, tokenizer=qwen_tokenizer(end=end))
    rows = [{"id": f"p{number}", "prompt": f"What is {number} and two?", "answer": "3"} for number in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree: dict[str, Any] = {
        "steps": 2,
        "models": {"student": str(folder / "student"), "teacher": str(folder / "teacher")},
        "data": {"prompts": str(folder / "prompts.jsonl"), "max_prompt_tokens": 64},
        "rollout": {"max_tokens": 16, "prompts_per_step": 4},
        "cluster": {"gpus_per_node": 2},
    }
    return make_config(tree | {name: tree.get(name, {}) | values for name, values in sections.items()})


def test_a_qwen_model_without_its_tokens_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verl says so when the first rollouts start, with all models loaded."""
    monkeypatch.setenv(STAND_IN, "verl_testing")  # GPUs are not counted
    monkeypatch.setattr(launch, "check_installed", lambda: None)
    config = config_of(tmp_path, end="<|end|>")
    with pytest.raises(
        VerlError, match=r"student .* is a 'qwen3' model, and its tokenizer has no token '<\|im_end\|>'.*add it"
    ):
        launch.run_on_verl(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_embedded_worlds_have_no_such_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their models are of Qwen's architecture, so that only tests, which replace that part of verl, can run them there."""
    check_wiring("llama", build_tokenizer(), "a model")
    with pytest.raises(VerlError, match=r"no token '<\|im_end\|>'"):
        check_wiring("qwen3", build_tokenizer(), "a world's student")


def test_a_checker_that_looks_for_tags_which_verl_drops_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, reward={"checker": "exact", "normalize": "none"})
    order, tokenizer = load_order(config, print)
    check_tokenizer(config, tokenizer, order.prompts)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    tokenizer = type("Special", (), {"added_tokens_decoder": {7: Special("<think>")}, **_asked(tokenizer)})()
    with pytest.raises(VerlError, match="<think> is a special token of the student's tokenizer: verl's reward workers"):
        check_tokenizer(config, tokenizer, order.prompts)


class Special(str):
    special = True


def _asked(tokenizer: Any) -> dict[str, Any]:
    return {
        "encode": lambda _, *given, **options: tokenizer.encode(*given, **options),
        "convert_tokens_to_ids": lambda _, token: tokenizer.convert_tokens_to_ids(token),
    }


def test_prompts_that_the_checker_cannot_judge_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, reward={"checker": "tiny", "normalize": "none"})
    order, tokenizer = load_order(config, print)
    with pytest.raises(VerlError, match=r"reward\.checker = 'tiny' cannot judge answers to 8 of 8 training prompts"):
        check_tokenizer(config, tokenizer, order.prompts)


def test_a_template_of_ones_own_is_saved_with_the_tokenizer(tmp_path: Path) -> None:
    """Verl renders by what the tokenizer says, and is told where that is."""
    from transformers import AutoTokenizer

    (tmp_path / "own.jinja").write_text("{{ 'Answer ' + style + '.\\n' }}" + TEMPLATE)
    given = {"chat_template": str(tmp_path / "own.jinja"), "chat_template_kwargs": {"style": "briefly"}}
    config = config_of(tmp_path, data={"prompts": str(tmp_path / "prompts.jsonl"), "max_prompt_tokens": 64, **given})
    where = places(config, tmp_path / "run")
    order, tokenizer = load_order(config, print)
    write_prompts(config, order, tokenizer, where)
    assert f"actor_rollout_ref.model.tokenizer_path={where.tokenizer}" in translate(config, where)
    assert tokenizer.chat_template == TEMPLATE  # the student's own stays as it was
    saved = AutoTokenizer.from_pretrained(where.tokenizer)
    prompt = order.prompts[0]
    rendered: Any = saved.apply_chat_template(
        prompt.metadata["messages"], add_generation_prompt=True, tokenize=False, style="briefly", enable_thinking=False
    )
    assert rendered.startswith("Answer briefly.\n<|im_start|>user\n")
    assert tuple(saved(rendered, add_special_tokens=False)["input_ids"]) == prompt.token_ids


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # verl, Ray and their dependencies warn at import
def test_verl_asks_for_these_tokens_and_wires_a_qwen_shaped_tokenizer() -> None:
    from verl.utils.tokenizer import continuous_token_wiring as wiring

    from iwopd.data.chat import Chat

    bare = build_tokenizer()
    kinds = [kind for kind in wiring._MODEL_TYPE_TO_FAMILY if "vl" not in kind and kind != "glm4v" and kind != "glm4v_moe"]
    refused = set()
    for kind in kinds:
        try:
            wiring.create_continuous_token_builder(bare, hf_model_type=kind)
        except ValueError:
            refused.add(kind)
    assert refused == set(WIRED)
    for kind in WIRED:
        with pytest.raises(VerlError, match=f"is a '{kind}' model"):
            check_wiring(kind, bare, "it")

    tokenizer = qwen_tokenizer()
    builder = wiring.create_continuous_token_builder(
        tokenizer, hf_model_type="qwen3", chat_template_kwargs={"enable_thinking": False}
    )
    assert type(builder).__name__ == "QwenContinuousTokenBuilder"
    check_wiring("qwen3", tokenizer, "it")
    rendered = Chat(tokenizer, kwargs={"enable_thinking": False}).render(MESSAGES)
    assert tuple(builder.build_initial_tokens(MESSAGES)) == rendered.token_ids
    answer = [*tokenizer("Three.")["input_ids"], tokenizer.eos_token_id]
    merged = builder.merge_assistant_tokens(list(rendered.token_ids), answer)
    assert merged.token_ids == [*rendered.token_ids, *answer]  # an answer's ids stay as they were written
