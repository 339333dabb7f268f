"""The math checker's decisions, through the real workers: one table of tricky answers, and what needs no worker."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iwopd.eval.math import LONGEST_ANSWER, MathOutcome, check_math, check_math_many
from iwopd.eval.workers import shared_pool


class Case(NamedTuple):
    id: str
    text: str
    """A completion; one without a box stands for the content of one."""
    gold: str
    status: str
    reason: str


# fmt: off
# ruff: noqa: E501
CASES = [
    # --- ways of writing a number
    Case("fraction-decimal", r"\frac12", "0.5", "correct", "an exact decimal is the fraction"),
    Case("short-fraction", r"\dfrac12", r"\frac{1}{2}", "correct", "dfrac, tfrac and missing braces are layout"),
    Case("slash", "3/4", r"\frac{3}{4}", "correct", "a slash is a fraction"),
    Case("mixed-number", r"2\frac{1}{2}", r"\frac52", "correct", "a number before a fraction is a mixed number, not a product"),
    Case("mixed-number-slash", "1 1/2", r"\frac32", "correct", "the same with a slash; math-verify alone reads 1"),
    Case("minus-place", r"-\frac{1}{2}", r"\frac{-1}{2}", "correct", "a minus may stand in the numerator"),
    Case("unicode-minus", "−5", "-5", "correct", "the typographic minus is a minus"),
    Case("leading-zeros", "073", "73", "correct", "AIME answers have three digits"),
    Case("thousands-comma", "1,000", "1000", "correct", "groups of three digits are one number, not a list"),
    Case("thousands-latex-comma", "1{,}234{,}567", "1234567", "correct", "the comma LaTeX sets without a space"),
    Case("thousands-thin-space", r"12\,345", "12345", "correct", "math-verify alone adds 12 and 345"),
    Case("thousands-thin-space-no-sum", r"1\,000", "1", "wrong", "so that this is not 1 + 0"),
    Case("side-by-side", "1 2", "3", "unparsed", "two numbers side by side could mean anything; math-verify alone adds them"),
    Case("decimal-comma", "0,5", "0.5", "wrong", "the comma separates a list; in English text it is no decimal sign"),
    Case("trailing-zeros", "1.50", "1.5", "correct", "the same number"),
    Case("full-stop", "5.", "5", "correct", "the full stop of a sentence"),
    Case("scientific", r"1.5\times 10^3", "1500", "correct", "powers of ten are numbers"),
    Case("repeating", r"0.\overline{3}", r"\frac13", "correct", "a bar repeats; math-verify alone cannot read it"),
    Case("root", r"\sqrt{8}", r"2\sqrt{2}", "correct", "symbolic equality"),
    Case("root-in-denominator", r"\frac{1}{\sqrt2}", r"\frac{\sqrt2}{2}", "correct", "symbolic equality"),
    Case("root-of-pi", r"\sqrt\pi", r"\pi^{1/2}", "correct", "braces may be missing; math-verify alone breaks this"),
    Case("not-simplified", "2+3", "5", "correct", "we check values, not form"),
    # --- rounding
    Case("three-decimals", "0.333", r"\frac13", "wrong", "0.333 is not a third"),
    Case("six-decimals", "0.333333", r"\frac13", "correct", "decimals agree if they round to the same six places"),
    Case("pi-two-decimals", "3.14", r"\pi", "wrong", "3.14 is not pi"),
    Case("tiny-decimals", "0.0000001", "0.0000002", "wrong", "six places would round both to zero: small golds get more"),
    Case("huge-integer", "12345678901234567890", "12345678901234567891", "wrong", "integers are exact"),
    Case("huge-power", "2^{100}", "1267650600228229401496703205376", "correct", "integers are exact"),
    Case("near-miss", r"\sqrt{10^{40}+1}", "10^{20}", "wrong", "21 digits agree; math-verify alone looks at 15"),
    # --- intervals and inequalities
    Case("interval-inequality", "(0,1)", "0<x<1", "correct", "the same set of x"),
    Case("inequality-interval", "0<x<1", "(0,1)", "correct", "and in the other order, which math-verify alone denies"),
    Case("half-open", r"0<x\le 1", "(0,1]", "correct", "ends count"),
    Case("open-closed", "(0,1)", "[0,1]", "wrong", "ends count"),
    Case("inequality-reversed", "1>x>0", "0<x<1", "correct", "math-verify alone compares chains link by link"),
    Case("inequality-variable", "0<y<1", "0<x<1", "wrong", "another variable is another statement"),
    Case("interval-membership", r"x\in(0,1)", "(0,1)", "correct", "the name of the variable before a set is layout"),
    Case("union-order", r"(-\infty,0)\cup(1,\infty)", r"(1,\infty)\cup(-\infty,0)", "correct", "a union has no order"),
    Case("ray", r"x\le 3", r"(-\infty,3]", "correct", "the same set"),
    Case("point-order", "(2,1)", "(1,2)", "wrong", "a pair has an order"),
    # --- logarithms
    Case("log-ln", r"\log 2", r"\ln 2", "wrong", "log without a base is to base ten, as in AMC and AIME; being both, log 100 would be 2 and 4.6"),
    Case("ln-log", r"\ln 2", r"\log 2", "wrong", "the same in the other order"),
    Case("log-ten", r"\log 100", "2", "correct", "base ten"),
    Case("log-base-e", r"\log_e 2", r"\ln 2", "correct", "an explicit base counts; math-verify alone needs braces"),
    Case("log-laws", r"2\ln 2", r"\ln 4", "correct", "symbolic equality"),
    Case("log-base", r"\log_2 3", r"\frac{\ln 3}{\ln 2}", "correct", "symbolic equality"),
    # --- percent, units, money, degrees
    Case("percent-number", r"50\%", "50", "correct", "golds to 'what percent' come with and without the sign"),
    Case("percent-value", r"50\%", "0.5", "correct", "a probability may be stated in percent"),
    Case("number-percent", "50", r"50\%", "correct", "the same in the other order"),
    Case("value-percent", r"\frac12", r"50\%", "correct", "the same in the other order"),
    Case("percent-percent", r"50\%", r"0.5\%", "wrong", "with a sign on both sides there is one reading"),
    Case("no-percent", "50", "0.5", "wrong", "without a sign there is one reading"),
    Case("percent-word", r"12.5 \text{ percent}", "12.5", "correct", "the word is the sign"),
    Case("unit", r"5\text{ cm}", "5", "correct", "units are dropped"),
    Case("unit-square", r"5\,\text{cm}^2", "5", "correct", "units are dropped with their powers"),
    Case("unit-other", r"5\text{ m}", r"5\text{ cm}", "correct", "a known leniency: units are dropped, not compared"),
    Case("money", r"\$5", "5", "correct", "the currency is dropped"),
    Case("degrees", r"90^\circ", "90", "correct", "the degree sign is dropped"),
    Case("degrees-radians", r"\frac{\pi}{2}", r"90^\circ", "wrong", "angles are not converted"),
    Case("degrees-in-cosine", r"\cos 60^\circ", r"\frac12", "correct", "but inside a function degrees are degrees"),
    # --- words around the answer
    Case("words-condition", r"5\text{ if n is even, else 7}", "5", "unparsed", "words that are no unit could mean anything; math-verify alone drops all of them"),
    Case("words-hedge", r"5\text{ (maybe 6)}", "5", "unparsed", "a second guess is no unit"),
    Case("words-or", r"5\text{ cm or 6 cm}", "5", "unparsed", "nor is a second value with its unit"),
    Case("words-or-more", r"5\text{ m}\text{ or more}", "5", "unparsed", "nor what follows a unit"),
    Case("words-upright", r"5\mathrm{\ if\ x>0}", "5", "unparsed", "in any font"),
    Case("words-between", r"2\text{ years and }3\text{ months}", "2", "wrong", "math-verify alone drops everything from the first word on"),
    Case("million", r"5\text{ million}", "5", "wrong", "a million is a number, not a unit"),
    Case("million-value", r"5\text{ million dollars}", "5000000", "correct", "so it multiplies"),
    Case("million-plain", "5 million", "5000000", "correct", "also without \\text"),
    Case("dozen", r"5\text{ dozen}", "60", "correct", "the same"),
    Case("million-gold", "5", r"5\text{ million}", "wrong", "on either side"),
    Case("unit-square-words", r"5\text{ square units}", "5", "correct", "a known unit is dropped"),
    Case("unit-quotient", r"5\ \text{m/s}", "5", "correct", "a quotient of units is one"),
    Case("unit-upright", r"5\mathrm{~cm}^2", "5", "correct", "units in any font"),
    Case("unit-counted", r"12\text{ ways}", "12", "correct", "and what is counted"),
    Case("unit-of-gold", r"\frac{24}{2}\text{ gizmos}", r"12\text{ gizmos}", "correct", "a word of the gold is known, too"),
    Case("unit-of-gold-only", "12", r"12\text{ gizmos}", "correct", "the gold's words at its end are a unit, whatever they are"),
    Case("unit-unknown", r"12\text{ gizmos}", "12", "unparsed", "others are not: the checker knows two hundred and fifty"),
    Case("answer-is", r"\text{The answer is }5", "5", "correct", "an empty phrase"),
    Case("answer-colon", r"\text{Final answer: }5", "5", "correct", "the same"),
    Case("about", r"\text{about }5", "5", "wrong", "an approximation is not the value"),
    # --- fonts, signs and scripts
    Case("bold", r"\boldsymbol{42}", "42", "correct", "fonts are layout"),
    Case("bold-product", r"2\mathbf{v}", "2", "wrong", "what they are around is not; math-verify alone drops it"),
    Case("underline", r"\underline{42}", "42", "correct", "a line below is layout"),
    Case("overline", r"\overline{42}", "42", "wrong", "a line above is not"),
    Case("colour", r"\color{red}{42}", "42", "correct", "colours are layout"),
    Case("full-width", "４２", "42", "correct", "full-width digits are digits"),
    Case("dot", r"0.\dot 3", r"\frac13", "correct", "a dot repeats"),
    Case("two-dots", r"0.1\dot{4}2\dot{8}", r"0.1\overline{428}", "correct", "two dots repeat what is between them"),
    Case("dot-other", r"0.\dot{3}", "0.3", "wrong", "and not nothing"),
    Case("imaginary-upright", r"2+3\mathrm{i}", "2+3i", "correct", "upright i is i"),
    Case("angle-brackets", r"\langle 1,2,3 \rangle", "(1,2,3)", "correct", "a vector in angle brackets is the tuple"),
    Case("angle-brackets-order", r"\langle 2,1,3 \rangle", "(1,2,3)", "wrong", "in its order"),
    # --- equations, lists, sets, tuples, matrices
    Case("assignment", "x=5", "5", "correct", "the name before the value is layout"),
    Case("assignment-gold", "5", "x=5", "correct", "on either side"),
    Case("assignment-other", "y=5", "x=5", "wrong", "two names that differ are a difference"),
    Case("equation-form", "y=2x+1", "2x-y+1=0", "correct", "the same line"),
    Case("expression", "(x+1)^2", "x^2+2x+1", "correct", "symbolic equality"),
    Case("expression-variable", "y^2+1", "x^2+1", "wrong", "another variable"),
    Case("set-order", r"\{2,1\}", r"\{1,2\}", "correct", "a set has no order"),
    Case("list-set", "2, 1", r"\{1,2\}", "correct", "a list of solutions is a set"),
    Case("list-and", r"1 \text{ and } 2", "1,2", "correct", "'and' is a comma"),
    Case("list-too-many", "1,2,3", "2", "wrong", "a list that contains the answer is not the answer"),
    Case("list-or", r"5\text{ or }6", "5", "wrong", "nor is a choice"),
    Case("list-repeated", "5,5", "5", "wrong", "a list that repeats itself is not its only entry"),
    Case("list-repeated-and", r"5\text{ and }5", "5", "wrong", "however it is written"),
    Case("list-repeated-both", "1,1,2", "2,1,1", "correct", "if both repeat as much"),
    Case("list-repeated-one", "1,1,2", "1,2", "wrong", "not if one does"),
    Case("set-repeated", r"\{5,5\}", r"\{5\}", "correct", "a set in its braces has nothing twice"),
    Case("pair-set", "(1,2)", r"\{1,2\}", "correct", "a known leniency of math-verify: brackets around a list"),
    Case("points", r"\{(1,2),(3,4)\}", "(3,4),(1,2)", "correct", "points in any order, each with its own"),
    Case("plus-minus", r"\pm 2", "2,-2", "correct", "both signs"),
    Case("plus-minus-half", "2", r"\pm 2", "wrong", "one of two solutions"),
    Case("plus-minus-sum", r"1\pm\sqrt{2}", r"1-\sqrt2,1+\sqrt2", "correct", "both signs"),
    Case("matrix-brackets", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", "correct", "brackets are layout"),
    Case("matrix-entries", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\4&3\end{pmatrix}", "wrong", "entries are not"),
    Case("empty-set", r"\varnothing", r"\emptyset", "correct", "two signs for one set"),
    # --- infinities and complex numbers
    Case("infinity", r"+\infty", r"\infty", "correct", "the plus is layout"),
    Case("infinity-sign", r"-\infty", r"\infty", "wrong", "the minus is not"),
    Case("complex-order", "2i+1", "1+2i", "correct", "a sum has no order"),
    Case("complex-power", "(1+i)^2", "2i", "correct", "i is the imaginary unit; math-verify alone takes it for a variable"),
    Case("euler", r"e^{i\pi}", "-1", "correct", "the same"),
    Case("complex-conjugate", "1-2i", "1+2i", "wrong", "the sign of i counts"),
    # --- words
    Case("word", r"\text{Tuesday}", r"\text{Tuesday}", "correct", "the same text"),
    Case("word-other", r"\text{Tuesday}", r"\text{Monday}", "wrong", "different text"),
    Case("choice", r"\text{(B)}", "B", "correct", "brackets around a choice are layout"),
    Case("choice-other", r"\textbf{(B)}", "C", "wrong", "another choice"),
    Case("time", r"10:00 \text{ p.m.}", r"10:00  \text{ p.m.}", "correct", "the same text but for spaces, whatever it means"),
    # --- boxes
    Case("several-boxes", r"\boxed{1} and \boxed{2}", "2", "correct", "only the last box counts"),
    Case("several-boxes-first", r"\boxed{1} and \boxed{2}", "1", "wrong", "so that boxing every guess earns nothing"),
    Case("several-boxes-set", r"\boxed{1} and \boxed{2}", "1,2", "wrong", "math-verify alone makes a set of them; the prompt asks for one box"),
    Case("thinking", r"<think>\boxed{5}</think> It is \boxed{6}.", "5", "wrong", "thinking is no answer"),
    Case("thinking-only", r"<think>\boxed{5}", "5", "unparsed", "thinking is no answer"),
    Case("fbox", r"\fbox{$\frac12$}", "0.5", "correct", "fbox is a box, and text mode needs dollars"),
    Case("box-in-box", r"\boxed{x = \boxed{5}}", "5", "correct", "the outer box counts"),
    Case("empty-box", r"\boxed{}", "5", "unparsed", "no answer"),
    Case("cut-off", r"\boxed{5} or rather \boxed{6", "5", "unparsed", "the text ended inside its answer; the box before does not step in"),
    # --- not to be understood
    Case("half-fraction", r"\frac{1}{", "1", "unparsed", "the box closes the fraction's brace, and none closes the box"),
    Case("dots", r"1+2+\cdots+10", "55", "unparsed", "an ellipsis has no value"),
    Case("zero-division", r"\frac{1}{0}", "5", "unparsed", "no value"),
    Case("prose", r"The answer is 5.", "6", "wrong", "letters are variables: readable, and different"),
    Case("gold-unreadable", "5", r"\frac{1}{", "unparsed", "the gold's fault, and the detail says so"),
    # --- too much
    Case("tower", "9^{9^{9^{9}}}", "5", "timeout", "nobody can compute it"),
    Case("tower-gold", "5", "9^{9^{9^{9}}}", "timeout", "on either side"),
    Case("tower-same", "9^{9^{9^{9}}}", "9^{9^{9^{9}}}", "correct", "the same text needs no computing"),
    Case("factorial", "(10^{10})!", "5", "timeout", "nobody can compute it"),
    Case("nested", "(" * 60 + "5" + ")" * 60, "6", "timeout", "math-verify's parser takes exponential time in nested brackets"),
]
# fmt: on


def boxed(answer: str) -> str:
    return rf"We find \boxed{{{answer}}}."


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES])
def test_decision(case: Case) -> None:
    text = case.text if re.search(r"\\boxed|\\fbox", case.text) else boxed(case.text)
    outcome = check_math(text, case.gold, timeout=0.7 if case.status == "timeout" else 30.0)
    assert outcome.status == case.status, f"{outcome.detail} -- expected because: {case.reason}"
    assert isinstance(outcome.status, str)
    assert outcome.detail


def test_the_table_has_at_least_sixty_cases_with_their_own_names() -> None:
    assert len({case.id for case in CASES}) == len(CASES) >= 60


@pytest.mark.parametrize(
    "gold", ["", "  ", r"\frac{1}{", r"\boxed{5}", r"\frac{0}{0}", "\x0crac{1}{2}", "1+" * LONGEST_ANSWER + "1"]
)
def test_a_bad_gold_is_said_to_be_the_golds_fault(gold: str) -> None:
    outcome = check_math(boxed("x"), gold)
    assert outcome.status == "unparsed"
    assert "GOLD" in outcome.detail
    assert outcome.answer == "x"


@pytest.mark.parametrize(
    ("text", "answer", "words"),
    [
        pytest.param("", None, "completion is empty", id="empty"),
        pytest.param("5", None, "no \\boxed{}", id="no box"),
        pytest.param(
            "\\boxed{\x0crac{1}{2}}",
            "\x0crac{1}{2}",
            "U+000C at position 0: was a backslash lost, as in \\frac?",
            id="form feed",
        ),
        pytest.param("\\boxed{5\x00}", "5\x00", "U+0000 at position 1", id="zero byte"),
        pytest.param("\\boxed{\x1b[2J5}", "\x1b[2J5", "U+001B", id="escape"),
        pytest.param("\\boxed{5\ud800}", "5\ud800", "U+D800", id="lone surrogate"),
        pytest.param("\boxed{5}", None, "backslash was lost", id="backspace"),
        pytest.param(boxed("1+" * LONGEST_ANSWER + "1"), "1+" * LONGEST_ANSWER + "1", "40001 characters", id="long answer"),
    ],
)
def test_bad_input_gets_clear_words_and_keeps_the_answer(text: str, answer: str | None, words: str) -> None:
    outcome = check_math(text, r"\frac{1}{2}")
    assert (outcome.status, outcome.answer) == ("unparsed", answer)
    assert words in outcome.detail


def test_control_characters_and_surrogates_around_the_box_do_not_matter() -> None:
    assert check_math("\x00\ud800\x1b so \\boxed{\\frac{1}{2}} \udfff", "0.5").status == "correct"
    assert check_math("\\boxed{\u200b\\frac{1}{2}\ufeff}", "0.5").status == "correct"  # invisible, but no control characters


def test_a_megabyte_around_the_box_does_not_matter() -> None:
    prose = "and so on { \\frac{1}{2} $x$ " * 40_000
    assert len(prose) > 1_000_000
    assert check_math(prose + boxed(r"\frac{1}{2}") + prose, "0.5").status == "correct"
    assert check_math(prose, "0.5").status == "unparsed"


INTEGERS = ["7", "007", "-7", "-007", "0", "-0", "000", "1,000", "1000", "-1,000", "-1000", "01000", "12,345,678", "12345678"]


def test_the_short_way_for_integers_agrees_with_the_worker() -> None:
    pool = shared_pool()
    pairs = [(answer, gold) for answer in INTEGERS for gold in INTEGERS]
    short = check_math_many([(boxed(answer), gold) for answer, gold in pairs])
    assert {outcome.detail for outcome in short} == {"the same text", "the same integer", "different integers"}
    assert [outcome.status for outcome in short] == [pool.check(answer, gold, 30.0).status for answer, gold in pairs]


digits = (
    st.integers(-(10**40), 10**40).map(str)
    | st.integers(0, 10**12).map(lambda n: f"{n:,}")
    | st.from_regex(r"-?0{0,3}\d", fullmatch=True)
)


@given(digits.filter(str.isascii), digits.filter(str.isascii))
def test_integers_compare_as_python_compares_them(answer: str, gold: str) -> None:
    expected = int(answer.replace(",", "")) == int(gold.replace(",", ""))
    assert check_math(boxed(answer), gold).status == ("correct" if expected else "wrong")


def test_what_looks_like_an_integer_but_is_none_goes_the_long_way() -> None:
    for answer, gold in [("0,5", "05"), ("1,00", "100"), ("٣", "3"), ("1,0000", "10000")]:
        assert "integer" not in check_math(boxed(answer), gold).detail


def test_long_integers_are_compared_exactly() -> None:
    number = "7" * 10_000
    assert check_math(boxed(number), "0" + number).status == "correct"
    assert check_math(boxed(number), number[:-1] + "8").status == "wrong"
    assert check_math(boxed("+" + number), number).status == "correct"  # by the worker


def test_many_keep_their_order_and_equal_pairs_are_compared_once() -> None:
    pairs = [(boxed(rf"\frac{{{i % 20}}}{{7}}"), rf"\frac{{{i % 2}}}{{7}}") for i in range(60)] + [("no box", "1"), ("", "1")]
    seen: list[tuple[int, int]] = []
    outcomes = check_math_many(pairs, progress=lambda done, total: seen.append((done, total)))
    assert [o.status for o in outcomes[:60]] == ["correct" if i % 20 == i % 2 else "wrong" for i in range(60)]
    assert [o.status for o in outcomes[60:]] == ["unparsed", "unparsed"]
    assert seen[-1] == (62, 62)
    assert len(seen) <= 2 + 20
    assert check_math_many([]) == []


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf")])
def test_a_senseless_timeout_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout must be a positive number"):
        check_math(boxed("1"), "1", timeout=timeout)


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(TypeError, match="gold must be a string, got int 5"):
        check_math(boxed("5"), 5)
    with pytest.raises(TypeError, match="text must be a string, got NoneType"):
        check_math(None, "5")


def test_outcomes_cannot_be_changed() -> None:
    outcome = check_math(boxed("5"), "5")
    assert outcome == MathOutcome("correct", "5", "the same text")
    with pytest.raises(AttributeError):
        outcome.status = "wrong"  # type: ignore[misc]
