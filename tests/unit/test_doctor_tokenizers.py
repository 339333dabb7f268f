"""What the doctor says of a teacher with another tokenizer: figures that are counted by hand, verdicts, two columns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from iwopd.config import make_config
from iwopd.data.chat import Chat
from iwopd.teacher.foreign import Coverage
from iwopd.train.doctor.case import Case, Member
from iwopd.train.doctor.findings import Finding
from iwopd.train.doctor.tokenizers import COLUMN, MOST_LINES, MOST_TOKENS, _verdict, check_spans, side_by_side
from iwopd.types import Prompt

CONTENT = "abcabc"


def words(pattern: str, tokens: list[str], template: str) -> Any:
    """A tokenizer that cuts by a pattern and knows these tokens; others are unknown to it."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<end>", *tokens])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", eos_token="<end>", chat_template=template, clean_up_tokenization_spaces=False
    )


LETTERS = words(r"[\s\S]", list("abc?\n "), "{% for m in messages %}{{ m['content'] }}?{% endfor %}")


def findings(teacher: Any, content: str = CONTENT) -> list[Finding]:
    config = make_config({"models": {"student": "s", "teacher": "t"}, "data": {"prompts": "p.jsonl"}})
    messages = [{"role": "user", "content": content}]
    text, ids = Chat(LETTERS).render(messages)
    prompt = Prompt("one", ids, text, metadata={"messages": messages})
    members = {name: Member(name, None, own) for name, own in (("student", LETTERS), ("teacher", teacher))}
    return list(check_spans(Case(config, members, 8, Path("run"), [prompt])))


def test_a_pair_of_one_tokenizer_has_nothing_to_say() -> None:
    assert findings(LETTERS) == []


def test_spans_are_counted_on_the_question_without_its_template() -> None:
    """Abcabc is `a b c a b c` to the student and `ab c ab c` to the teacher: spans of two tokens and of one."""
    teacher = words(r"ab|[\s\S]", ["ab", "c", "?", " ", "\n"], "{% for m in messages %}{{ m['content'] }} \n{% endfor %}")
    spans, renderings = findings(teacher)
    assert (spans.level, spans.check) == ("pass", "spans")
    assert "on the text of 1 prompts: 1.50 tokens of the student a span (0.67 of the teacher's" in spans.message
    assert "33% of its tokens stand alone, the teacher's tokenizer can write all of the text" in spans.message
    assert (renderings.level, renderings.check) == ("pass", "renderings")
    assert "7 ids of the student's tokenizer, 6 of the teacher's" in renderings.message
    assert [line.split(" | ") for line in renderings.details.splitlines()] == [
        ["student".ljust(COLUMN), "teacher"],
        ["'abcabc?'".ljust(COLUMN), r"'abcabc \n'"],
    ]


def test_text_that_the_teacher_cannot_write_is_a_warning_and_most_of_it_a_failure() -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    some = findings(words(r"[\s\S]", ["c", "b"], template), "ccccbbbbca")[0]
    assert (some.level, "cannot write 10 % of the text" in some.message) == ("warn", True)
    most = findings(words(r"[\s\S]", ["c"], template), "abaabc")[0]
    assert (most.level, "cannot write 83 % of the text" in most.message) == ("fail", True)
    assert "teacher.tokenizer" in most.remedy


def test_a_template_that_refuses_the_prompt_is_a_failure() -> None:
    teacher = words(r"[\s\S]", list("cba"), "{{ raise_exception('no') }}")
    assert [finding.level for finding in findings(teacher)] == ["pass", "fail"]


@pytest.mark.parametrize(
    ("changed", "level"),
    [
        ({}, "pass"),
        ({"spans": int(1000 / MOST_TOKENS) - 1}, "warn"),
        ({"lost": 10}, "pass"),
        ({"lost": 11}, "warn"),
        ({"lost": 501}, "fail"),
    ],
    ids=str,
)
def test_verdicts_change_at_their_thresholds(changed: dict[str, int], level: str) -> None:
    found = Coverage(tokens=1000, teacher_tokens=900, spans=800, alone=700, unscored=0, bytes=1000, lost=0)
    assert _verdict(replace(found, **changed), "here").level == level


def test_columns_are_quoted_wrapped_and_cut_in_the_middle() -> None:
    text = "x" * 200 + " \n" + "end"
    lines = side_by_side(text, "short").splitlines()
    assert len({line.index(" |") for line in lines}) == 1
    left = [line.split(" |")[0].strip() for line in lines[1:]]
    assert "".join(eval(piece) for piece in left) == text
    assert left[-2].endswith(r" \n'")
    assert max(map(len, left)) <= COLUMN
    long = side_by_side("\n".join(map(str, range(100))), "").splitlines()
    assert len(long) == MOST_LINES + 2
    assert "76 more lines" in long[1 + MOST_LINES // 2]
