"""Chat templates and thinking blocks: what is read, what is refused in words, and which tokens are thinking."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from iwopd.cli import main
from iwopd.commands.options import add_chat_options, rendering
from iwopd.config import Config, ConfigError, config_toml, differences, load_config, make_config
from iwopd.data.chat import Chat, ChatError, Rendering
from iwopd.data.templates import known_names, read_template
from iwopd.data.thinking import opened_at_end, strip_thinking, thinking_spans
from iwopd.eval.answers import answer_text, check_answers
from iwopd.eval.checkers import exact_checker, math_checker
from iwopd.train.chats import eval_rendering, student_chat, teacher_chat, teacher_view
from iwopd.train.state import TrainingStoppedError
from iwopd.train.thinking import ThinkingTokens, teaching_mask
from iwopd.types import Prompt, Rollout
from models import byte_tokenizer

IW_OPD = {"weights": "cumulative-share"}
PAIR = {"models": {"student": "s", "teacher": "t"}, "data": {"prompts": "p.jsonl"}}
THINKS = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{{ effort | default('') }}"
)
USER = [{"role": "user", "content": "1+2"}]


def config(**sections: Any) -> Config:
    return make_config({**PAIR, **{name: {**PAIR.get(name, {}), **values} for name, values in sections.items()}})


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


# --- templates ----------------------------------------------------------------------------------------------------------


def test_names_that_a_template_asks_for() -> None:
    assert known_names(THINKS) == {"enable_thinking", "effort"}
    generation = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}{{ eos_token }}"
    )
    assert known_names(generation) == set()  # transformers' own tags are understood
    assert known_names("{% set thinking = thinking | default(true) %}{{ thinking }}") == {"thinking"}


def test_a_template_is_read_once_and_its_text_stays_in_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(THINKS)
    began = config(data={"chat_template": str(file)})
    assert began.data.chat_template == THINKS
    saved = tmp_path / "config.toml"
    saved.write_text(config_toml(began))
    file.unlink()
    assert load_config(saved, saved=True) == began  # a resume needs no file
    file.write_text(THINKS + "!")
    assert list(differences(began, config(data={"chat_template": str(file)}))) == ["data.chat_template"]


def test_settings_of_an_older_run_are_those_of_today(tmp_path: Path) -> None:
    text = config_toml(config())
    for line in ('prefill = ""\n', 'thinking = "keep"\n', "[data.chat_template_kwargs]\n", "[eval.chat_template_kwargs]\n"):
        assert line in text
        text = text.replace(line, "")
    text = text.replace("[teacher.chat_template_kwargs]\n", "")
    (tmp_path / "config.toml").write_text(text)
    assert load_config(tmp_path / "config.toml", saved=True) == config()


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"data": {"chat_template": "nowhere/mine.jinja"}}, "data.chat_template: there is no file nowhere/mine.jinja"),
        ({"data": {"chat_template": "{% for m in %}"}}, "data.chat_template: the chat template is no Jinja template: line 1"),
        ({"teacher": {"chat_template": "nowhere.jinja"}}, "teacher.chat_template: there is no file nowhere.jinja"),
        ({"data": {"chat_template_kwargs": True}}, "data.chat_template_kwargs: must be a table of names and values"),
        ({"eval": {"chat_template_kwargs": [1]}}, "eval.chat_template_kwargs: must be a table"),
        ({"data": {"chat_template_kwargs": {"tokenize": True}}}, "'tokenize' is not a template's to receive"),
        ({"rollout": {"thinking": "off"}}, "rollout.thinking"),
        (
            {
                "rollout": {"thinking": "mask", "max_tokens": 64, "horizon": {"type": "drift"}},
                "method": {"weights": "survival"},
            },
            "stops answers by the gaps of all their tokens",
        ),
    ],
)
def test_bad_settings_are_refused_in_words(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    assert words in str(caught.value)


def test_files_that_are_no_templates(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("Dear model")
    with pytest.raises(ConfigError, match=r"letter.txt is no Jinja template: it has neither"):
        config(data={"chat_template": str(tmp_path / "letter.txt")})
    (tmp_path / "latin").write_bytes(b"{{ \xe9 }}")
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        config(data={"chat_template": str(tmp_path / "latin")})


def test_a_world_brings_its_rendering() -> None:
    with pytest.raises(ConfigError, match=r"data\.prefill is given, but models\.world brings rendered prompts"):
        make_config({"models": {"world": "clean"}, "data": {"prefill": "1"}})


def test_students_evaluations_and_teachers_have_their_own(tokenizer: Any) -> None:
    plain = config()
    assert student_chat(plain, tokenizer) == Chat(tokenizer)
    assert teacher_view(plain, plain.teacher, tokenizer) is None
    own = config(
        data={"chat_template": THINKS, "chat_template_kwargs": {"enable_thinking": True, "effort": "low"}, "prefill": "So"},
        eval={"chat_template_kwargs": {"effort": "high"}},
        teacher={
            "chat_template_kwargs": {"enable_thinking": False},
            "others": {"x": {"model": "m", "chat_template": "{{ 1 }}"}},
        },
    )
    assert student_chat(own, tokenizer).text(USER).endswith("<think>\nlowSo")
    assert eval_rendering(own).of(tokenizer).text(USER).endswith("<think>\nhighSo")
    assert teacher_chat(own, own.teacher, tokenizer).text(USER).endswith("</think>\n\nlowSo")
    assert teacher_chat(own, own.teacher.others["x"], tokenizer).text(USER) == "1So"
    assert teacher_chat(own, own.teacher, tokenizer, foreign=True).text(USER).endswith("assistant: So")  # its tokenizer's
    view = teacher_view(own, own.teacher, tokenizer)
    assert view is not None
    text, ids = student_chat(own, tokenizer).render(USER)
    seen = view(Prompt("p", ids, text, metadata={"messages": USER}))
    assert seen.text.endswith("</think>\n\nlowSo")
    assert seen.token_ids == tuple(tokenizer(seen.text, add_special_tokens=False)["input_ids"])
    with pytest.raises(ChatError, match="chat_template_kwargs need prompts that were rendered from messages"):
        view(Prompt("p", ids, text))


def test_a_prefill_ends_the_prompt_and_holds_no_special_token(tokenizer: Any) -> None:
    chat = Chat(tokenizer, prefill="<think>\nOkay")  # an opening tag is text of an answer
    assert chat.text(USER).endswith("assistant: <think>\nOkay")
    assert not chat.text([*USER, {"role": "assistant", "content": "3"}], answered=True).endswith("Okay")
    with pytest.raises(ChatError, match="holds the special token '<eos>'"):
        Chat(tokenizer, prefill="1<eos>")


def test_what_of_an_answer_a_prompt_holds(tokenizer: Any) -> None:
    def begun(template: str | None, prefill: str, **kwargs: Any) -> str:
        chat = Chat(tokenizer, template, kwargs, prefill)
        return chat.begun(chat.text([{"role": "user", "content": "what is <think>?"}]))

    assert begun(None, "") == ""  # a tag in the question opens nothing
    assert begun(THINKS, "", enable_thinking=False) == ""
    assert begun(THINKS, "", enable_thinking=True) == "<think>\n"
    assert begun(THINKS, "Hm", enable_thinking=True) == "<think>\nHm"
    assert begun(None, "<think>") == "<think>"
    assert opened_at_end("a </think>\n") == opened_at_end("<think> b") == opened_at_end("") == ""


def options(*words: str) -> Any:
    import argparse

    parser = argparse.ArgumentParser()
    add_chat_options(parser)
    return parser.parse_args(words)


def test_options_of_commands(tmp_path: Path) -> None:
    (tmp_path / "t").write_text(THINKS)
    trained = Rendering(None, {"enable_thinking": True, "effort": "low"}, "So")
    assert rendering(options(), trained) == trained
    given = ("--no-thinking", "--chat-template", str(tmp_path / "t"), "--chat-template-kwargs", "{a = 1}", "--prefill", "")
    assert rendering(options(*given), trained) == Rendering(THINKS, {"enable_thinking": False, "effort": "low", "a": 1}, "")
    for wrong in (("--chat-template", "nowhere"), ("--chat-template-kwargs", "on")):
        with pytest.raises(ConfigError, match=wrong[0]):
            rendering(options(*wrong))


def test_a_probe_of_a_world_takes_no_template(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["probe", "--world", "clean", "--thinking"])
    assert end.value.code == 2
    assert "--world brings rendered prompts: leave --thinking" in capsys.readouterr().err


# --- thinking blocks in texts ---------------------------------------------------------------------------------------------


def _visible(text: str) -> str:
    """The rules again, by another way: cut at tags, and keep what stands outside."""
    pieces = re.split(r"(<\s{0,2}/?\s{0,2}think(?:ing)?\s{0,2}>)", text, flags=re.IGNORECASE)
    kept, inside = [pieces[0]], False
    for tag, piece in zip(pieces[1::2], pieces[2::2], strict=True):
        if "/" in tag:
            kept = kept if inside else []
            inside = False
        else:
            inside = True
        kept += [] if inside else [piece]
    return "".join(kept)


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "< / Thinking >", "a", "é", "<", "think>", "\n", "😀"]), max_size=12)


@given(PIECES)
def test_blocks_are_found_as_before(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert strip_thinking(text) == _visible(text)
    spans = thinking_spans(text)
    assert all(start < end for start, end in spans)
    assert all(one[1] <= other[0] for one, other in pairwise(spans))


def test_checkers_know_what_stands_in_the_prompt() -> None:
    open_block = Prompt("p", (1,), answer="5", begun="<think>\n")
    (cut_off,) = check_answers(math_checker, [open_block], [r"perhaps \boxed{5}"])
    assert cut_off.status == "unparsed"  # thinking is no answer, and it never ended
    (whole,) = check_answers(math_checker, [open_block], [r"\boxed{4}?</think> \boxed{5}"])
    assert whole.score == 1
    boxed = Prompt("p", (1,), answer="5", begun=r"It is \boxed{")
    assert [verdict.score for verdict in check_answers(math_checker, [boxed, boxed], ["5}.", "6}."])] == [1, 0]
    (exact,) = check_answers(exact_checker, [open_block], ["4? 5!</think>\n5"])
    assert (exact.score, exact.answer) == (1, "5")


def test_special_tags_stay_in_the_text() -> None:
    tokenizer = byte_tokenizer()
    ids = torch.tensor(tokenizer("a</think>b<eos>", add_special_tokens=False)["input_ids"])
    assert answer_text(tokenizer, ids) == "a</think>b"
    tokenizer.add_tokens([AddedToken("</think>", special=True, normalized=False)])
    ids = torch.tensor(tokenizer("é</think>b<eos>", add_special_tokens=False)["input_ids"])
    assert tokenizer.decode(ids, skip_special_tokens=True) == "éb"
    assert answer_text(tokenizer, ids) == "é</think>b"


# --- thinking blocks in ids -----------------------------------------------------------------------------------------------


def rollout(ids: list[int], begun: str = "", stop: Any = "length") -> Rollout:
    return Rollout(Prompt("p", (5,), begun=begun), torch.tensor(ids, dtype=torch.long), torch.zeros(len(ids)), stop)


def encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@given(PIECES, st.sampled_from(["", "<think>", "<think>\nHm", "So ", "<think>a</think>"]))
def test_tokens_are_thinking_where_their_text_is(pieces: list[str], begun: str) -> None:
    """Bytes as tokens: every tag and every character is split."""
    tokenizer, text = _BYTES, "".join(pieces)
    ids = encoded(tokenizer, text)
    mask = _FOUND.mask(rollout(ids, begun))
    bytes_of = [_FOUND._bytes[number] for number in ids]
    visible = b"".join(piece for piece, inside in zip(bytes_of, mask.tolist(), strict=True) if not inside)
    assert strip_thinking(begun + text).encode().endswith(visible)
    assert len(strip_thinking(begun + text).encode()) - len(visible) <= len(begun.encode())  # the rest stands in the prompt
    if not begun:
        assert strip_thinking(text).encode() == visible


_BYTES = byte_tokenizer()
_FOUND = ThinkingTokens(_BYTES)


def test_tags_of_one_token_and_answers_that_never_close() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=True)])
    opening, closing, end = (tokenizer.convert_tokens_to_ids(word) for word in ("<think>", "</think>", "<eos>"))
    found = ThinkingTokens(tokenizer)

    def mask(ids: list[int], begun: str = "") -> str:
        return "".join("t" if one else "." for one in found.mask(rollout(ids, begun)).tolist())

    assert mask([opening, 7, 8, closing, 9, end]) == "tttt.."
    assert mask([7, closing, 9, end], "<think>\n") == "tt.."
    assert mask([7, 8, 9], "<think>\n") == "ttt"  # cut off in its thoughts
    assert mask([7, opening, 8, end]) == ".ttt"
    assert mask([7, 8, end]) == "..."
    assert mask([7, closing, 9]) == "tt."  # began before the answer
    assert mask([]) == ""
    assert mask([7, 10_000, closing, 9], "<think>") == "ttt."  # an id that is nothing


def test_a_token_that_holds_a_part_of_a_block_belongs_to_it() -> None:
    """A tag's last letter and the answer's first in one token; a character that two tokens share."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("k>3", special=False, normalized=False)])
    found = ThinkingTokens(tokenizer)
    ids = encoded(tokenizer, "a</think>3=3é")
    assert tokenizer.convert_tokens_to_ids("k>3") in ids
    inside = found.mask(rollout(ids, "<think>")).tolist()
    assert inside == [True] * 8 + [False] * 4  # a < / t h i n k>3, then = 3 and the two bytes of é


@pytest.mark.parametrize(
    ("thinking", "truncated", "wanted"),
    [
        ("keep", "keep", None),
        ("mask", "keep", ["..xx", "....", "xxx."]),
        ("only", "keep", ["xx..", "xxx.", "...."]),
        ("keep", "mask", ["xxxx", "....", "xxx."]),
        ("mask", "mask", ["..xx", "....", "xxx."]),
        ("only", "mask", ["xx..", "....", "...."]),
    ],
)
def test_what_teaches(thinking: str, truncated: str, wanted: list[str] | None) -> None:
    settings = config(rollout={"thinking": thinking, "truncated": truncated, "max_tokens": 8})
    rollouts = [rollout([1, 2, 3, 4], stop="eos"), rollout([1, 2, 3]), rollout([1, 2, 3], stop="eos")]
    blocks = [torch.tensor([True, True, False, False]), torch.tensor([True] * 3), torch.tensor([False] * 3)]
    mask = teaching_mask(settings, blocks, rollouts)
    assert (None if mask is None else ["".join("x" if one else "." for one in row) for row in mask.tolist()]) == wanted


def test_nothing_left_ends_with_words() -> None:
    thoughts, plain = [torch.tensor([True, True])], [torch.tensor([False, False])]
    with pytest.raises(TrainingStoppedError, match=r"thinking to its last token.*Raise rollout\.max_tokens"):
        teaching_mask(config(rollout={"thinking": "mask"}), thoughts, [rollout([1, 2])])
    with pytest.raises(TrainingStoppedError, match=r"no rollout of the step has a thinking block.*enable_thinking = true"):
        teaching_mask(config(rollout={"thinking": "only"}), plain, [rollout([1, 2])])


def test_a_template_read_twice_is_the_same() -> None:
    assert read_template(read_template(THINKS)) == THINKS
