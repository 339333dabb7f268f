"""The embedded tokenizer is a tokenizer like any other: round trips, template, save and load."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from iwopd.tiny import task
from iwopd.tiny.architecture import ModelSize, new_model
from iwopd.tiny.tokenizer import EOS, PAD, PIECES, PIECES_END, TOKENS, build_tokenizer

EXPRESSION = "9+3+7+5*4+1"


def test_there_are_21_tokens_with_stable_ids() -> None:
    tokenizer = build_tokenizer()
    assert len(tokenizer) == len(TOKENS) == 21
    assert tokenizer.get_vocab() == {token: i for i, token in enumerate(TOKENS)}
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (TOKENS.index(PAD), TOKENS.index(EOS)) == (0, 1)
    assert tokenizer.bos_token_id is None


def test_text_to_ids_and_back_is_exact() -> None:
    tokenizer = build_tokenizer()
    for operands in (3, 6, 8):
        for expression in task.distinct_problems(operands, "train", random.Random("t"), 20):
            text = f"{expression}?{task.mixed_solution(expression, 0.5, random.Random(expression))}"
            ids = tokenizer.encode(text)
            assert len(ids) == 2 * operands + task.response_tokens(operands) - 1
            assert tokenizer.decode(ids) == text


def test_ids_to_text_and_back_is_exact_for_any_ids() -> None:
    """Whatever a model says can be read and read back."""
    tokenizer, rng = build_tokenizer(), random.Random("ids")
    for _ in range(200):
        ids = [rng.randrange(len(TOKENS)) for _ in range(rng.randrange(1, 60))]
        assert tokenizer.encode(tokenizer.decode(ids)) == ids


def test_pieces_write_the_same_texts_with_other_ids_and_boundaries() -> None:
    pieces, characters = build_tokenizer(PIECES), build_tokenizer()
    assert len(pieces) == 65
    assert pieces.eos_token == PIECES_END != EOS
    for expression in task.distinct_problems(6, "train", random.Random("t"), 20):
        solution = task.mixed_solution(expression, 0.5, random.Random(expression))
        ids, own = pieces.encode(solution), characters.encode(solution)
        assert pieces.decode(ids) == solution
        assert len(ids) < len(own) < len(solution)
        words = [str(pieces.convert_ids_to_tokens(i)) for i in ids]
        assert words[-4:-2] == ["\n\\bo", "xed{"]  # the student's are \n and \boxed{: no boundary in common
        assert any(len(word) == 2 and word[1] in "+-*" for word in words)
    with pytest.raises(ValueError, match=r"unknown tokenizer 'peices'.*pieces"):
        build_tokenizer("peices")


def test_special_tokens_can_be_left_out_of_the_text() -> None:
    tokenizer = build_tokenizer()
    ids = [*tokenizer.encode("\\boxed{4}"), 1, 0, 0]
    assert tokenizer.decode(ids) == "\\boxed{4}<eos><pad><pad>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "\\boxed{4}"


@pytest.mark.parametrize("text", ["a", "9 + 3", "\\boxed", "９"])
def test_text_without_a_token_is_an_error(text: str) -> None:
    with pytest.raises(Exception, match="Missing"):
        build_tokenizer().encode(text)


def test_chat_template_renders_prompt_and_whole_conversation() -> None:
    tokenizer = build_tokenizer()
    user = {"role": "user", "content": EXPRESSION}
    prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True, tokenize=False)
    assert prompt == f"{EXPRESSION}?"
    assert len(tokenizer.encode(prompt)) == 12
    assert tokenizer.apply_chat_template([user], tokenize=False) == EXPRESSION
    assistant = {"role": "assistant", "content": "\\boxed{0}"}
    assert tokenizer.apply_chat_template([user, assistant], tokenize=False) == f"{prompt}\\boxed{{0}}{EOS}"
    with pytest.raises(Exception, match="not system"):
        tokenizer.apply_chat_template([{"role": "system", "content": "1"}, user], tokenize=False)


@pytest.mark.parametrize("beside_a_model", [False, True])
def test_saved_and_loaded_like_any_other(tmp_path: Path, beside_a_model: bool) -> None:
    """Also beside a Qwen3 config, which must not make it a Qwen tokenizer."""
    if beside_a_model:
        new_model(ModelSize(8, 1), "x").save_pretrained(tmp_path)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = f"{EXPRESSION}?{task.right_solution(EXPRESSION)}"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.chat_template == tokenizer.chat_template
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.padding_side) == (0, 1, "left")
