"""Which box of a completion is its answer."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iwopd.data.thinking import strip_thinking
from iwopd.eval.boxed import last_boxed

FOUND = [
    ("plain", r"So \boxed{5}.", "5"),
    ("spaces", r"\boxed  {  5 }", "5"),
    ("newline", "\\boxed\n{5\n}", "5"),
    ("nested braces", r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
    ("set braces", r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    ("one set brace", r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
    ("line break before a brace", r"\boxed{\begin{matrix}1\\{2}\end{matrix}}", r"\begin{matrix}1\\{2}\end{matrix}"),
    ("dollars around", r"$\boxed{5}$", "5"),
    ("display", r"\[ \boxed{5} \]", "5"),
    ("last of several", r"\boxed{1} and \boxed{2}", "2"),
    ("same box twice", r"\boxed{1}, that is \boxed{1}", "1"),
    ("fbox", r"\fbox{5}", "5"),
    ("framebox", r"\framebox{5}", "5"),
    ("framebox with sizes", r"\framebox[2cm][l]{5}", "5"),
    ("fbox after boxed", r"\boxed{1} \fbox{2}", "2"),
    ("doubled backslash", r"\\boxed{5}", "5"),
    ("text", r"\boxed{\text{Tuesday}}", r"\text{Tuesday}"),
    ("box in a box", r"\boxed{\boxed{5}}", r"\boxed{5}"),
    ("outer box counts", r"\boxed{\fbox{1}, 2}", r"\fbox{1}, 2"),
    ("digit without braces", r"\boxed 5", "5"),
    ("one token, as LaTeX", r"\boxed 42", "4"),
    ("letter without braces", r"\boxed x.", "x"),
    ("command without braces", r"\boxed\pi", r"\pi"),
    ("stray brace before", r"let { be a brace. \boxed{5}", "5"),
    ("stray brace after", r"\boxed{5} } }", "5"),
    ("word about boxes after", r"\boxed{5} I used \boxed notation.", "5"),
    ("closed box in an open one", r"\boxed{5 so \boxed{6}", "6"),
    ("thinking before", r"<think>\boxed{1}</think> \boxed{2}", "2"),
    ("thinking after", r"\boxed{2} <think>or \boxed{1}?</think>", "2"),
    ("opened in the prompt", r"\boxed{1} hm</think>\boxed{2}", "2"),
    ("tag inside a thought", r"<think>a <think> \boxed{1} </think> \boxed{3} </think> \boxed{2}", "2"),
    ("unclosed thinking after", r"\boxed{2} <think> or \boxed{3}", "2"),
    ("capitals and spaces in tags", r"< Think >\boxed{1}</ THINK >\boxed{2}", "2"),
    ("other word", r"\boxedtext{7} \boxed{5}", "5"),
]

NOT_FOUND = [
    ("empty", "", "the completion is empty"),
    ("blank", " \n\t", "the completion is empty"),
    ("none", "The answer is 5.", r"no \boxed{} in the text"),
    ("only thinking", r"<think>\boxed{5}</think> done", "outside of thinking blocks"),
    ("only unclosed thinking", r"<think>\boxed{5}", "outside of thinking blocks"),
    ("only before a closing tag", r"\boxed{5}</think>", "outside of thinking blocks"),
    ("empty box", r"\boxed{}", "is empty"),
    ("blank box", r"\boxed{ }", "is empty"),
    ("empty box last", r"\boxed{5} \boxed{}", "is empty"),
    ("cut off", r"\boxed{\frac{1}{2}", "never closed"),
    ("cut off after a whole one", r"\boxed{5} no, \boxed{6", "never closed"),
    ("escaped closing brace", r"\boxed{5\}", "never closed"),
    ("end after the command", r"so \boxed", "without an argument"),
    ("lost backslash", "\boxed{5}", "its backslash was lost"),
]


@pytest.mark.parametrize(("text", "answer"), [pytest.param(t, a, id=name) for name, t, a in FOUND])
def test_finds_the_last_box(text: str, answer: str) -> None:
    assert last_boxed(text).answer == answer


@pytest.mark.parametrize(("text", "why"), [pytest.param(t, w, id=name) for name, t, w in NOT_FOUND])
def test_says_why_there_is_no_answer(text: str, why: str) -> None:
    boxed = last_boxed(text)
    assert boxed.answer is None
    assert why in boxed.why


@pytest.mark.parametrize(
    "piece", ["\\boxed{", "\\boxed{}", "{", "\\", "<think>", "</think>", "\\framebox[", "\\boxed ", "< ", " "]
)
@pytest.mark.parametrize("start", ["", "<", "\\boxed", "\\framebox"])
def test_a_hostile_megabyte_takes_linear_time(start: str, piece: str) -> None:
    def seconds(size: int) -> float:
        text = start + piece * (size // len(piece)) + r"\boxed{5}"
        started = time.process_time()
        last_boxed(text)
        return time.process_time() - started

    few = max(0.01, seconds(50_000))
    assert seconds(1_000_000) < 100 * few  # quadratic would be 400 times as long


@given(st.lists(st.sampled_from(["<think>", "</think>", "a", "b"])))
def test_no_tag_survives_and_what_follows_the_last_closing_tag_does(parts: list[str]) -> None:
    text = "".join(parts)
    visible = strip_thinking(text)
    assert "think" not in visible
    tail = text.rpartition("</think>")[2]
    assert visible.endswith(tail.partition("<think>")[0])


@given(st.text(alphabet="\\boxedfram{} 5<think>/\n"))
def test_any_text_gives_an_answer_or_a_reason(text: str) -> None:
    boxed = last_boxed(text)
    assert (boxed.answer is None) == bool(boxed.why)
    assert boxed.answer is None or boxed.answer.strip() != ""
