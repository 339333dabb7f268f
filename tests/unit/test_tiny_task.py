"""The task of the embedded world against an evaluator of its own, its split, and its verifier on garbage."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from iwopd.tiny import task

EXAMPLE = "9+3+7+5*4+1"
EXAMPLE_SOLUTION = "5*4=0;9+3+7+0+1\n9+3=2;2+7+0+1\n2+7=9;9+0+1\n9+0=9;9+1\n9+1=0;0\n\\boxed{0}"


def sample(operands: int = 6, split: task.Split = "train", count: int = 300, seed: str = "test") -> list[str]:
    return list(islice(task.problems(operands, split, random.Random(seed)), count))


def by_python(expression: str) -> str:
    """Python's own arithmetic, which knows the order of operations."""
    return str(eval(expression) % 10)


def by_hand_left_to_right(expression: str) -> str:
    value = int(expression[0])
    for operator, digit in re.findall(r"([+*-])(\d)", expression):
        value = eval(f"{value}{operator}{digit}" if value >= 0 else f"({value}){operator}{digit}")
    return str(value % 10)


def test_example_of_the_documentation() -> None:
    assert task.right_solution(EXAMPLE) == EXAMPLE_SOLUTION
    assert task.answer(EXAMPLE) == "0"


@pytest.mark.parametrize("operands", [3, 4, 6, 8, 16])
def test_answers_and_solutions_agree_with_python(operands: int) -> None:
    for expression in sample(operands):
        assert task.answer(expression) == by_python(expression)
        assert task.right_solution(expression).endswith(f"\n\\boxed{{{by_python(expression)}}}")
        assert task.left_to_right_solution(expression).endswith(f"\n\\boxed{{{by_hand_left_to_right(expression)}}}")


@pytest.mark.parametrize("solve", [task.right_solution, task.left_to_right_solution])
def test_every_line_follows_from_the_one_before(solve: object) -> None:
    """Each line reduces one operator of the expression before it, computes it right, and copies the rest."""
    assert callable(solve)
    for expression in sample(7, count=100):
        *lines, _ = solve(expression).split("\n")
        assert len(lines) == 6
        for line in lines:
            step, rest = line.split(";")
            left, value = step.split("=")
            assert str(eval(left) % 10) == value
            assert rest in {
                expression[:i] + value + expression[i + 3 :] for i in range(len(expression)) if expression[i : i + 3] == left
            }
            expression = rest


def test_problems_have_the_asked_form_and_two_different_values() -> None:
    expressions = sample(6, count=3000)
    assert all(re.fullmatch(r"\d([+*-]\d){5}", e) and by_python(e) != by_hand_left_to_right(e) for e in expressions)
    # Keeping only problems where the order matters raises the share of `*` a little above the 0.4 that is drawn.
    share = sum(e.count("*") for e in expressions) / (5 * len(expressions))
    assert 0.38 < share < 0.50
    assert abs(sum(e.count("+") for e in expressions) / sum(e.count("-") for e in expressions) - 1) < 0.1


def test_mixture_draws_every_line_by_itself() -> None:
    rng = random.Random("mixture")
    expression = "1+2*3-4*5+6*7"
    right, wrong = task.right_solution(expression), task.left_to_right_solution(expression)
    assert task.mixed_solution(expression, 1.0, rng) == right
    assert task.mixed_solution(expression, 0.0, rng) == wrong
    drawn = [task.mixed_solution(expression, 0.3, rng) for _ in range(2000)]
    assert len(set(drawn)) > 4
    share = sum(text.startswith("2*3=6") for text in drawn) / len(drawn)
    assert 0.26 < share < 0.34


@pytest.mark.parametrize("operands", [3, 6, 8])
def test_number_of_tokens_is_known_beforehand(operands: int) -> None:
    for expression in sample(operands, count=20):
        text = task.mixed_solution(expression, 0.5, random.Random(expression))
        assert len(text.replace("\\boxed{", "#")) + 1 == task.response_tokens(operands)


@pytest.mark.parametrize("operands", [3, 4, 6, 8])
def test_no_evaluation_problem_is_ever_a_training_problem(operands: int) -> None:
    train = {e for seed in "abc" for e in sample(operands, "train", 2000, seed)}
    evaluation = {e for seed in "abc" for e in sample(operands, "eval", 500 if operands > 3 else 100, seed)}
    assert train
    assert evaluation
    assert not train & evaluation
    assert all(task.split_of(e) == "eval" for e in evaluation)


def test_the_evaluation_split_is_about_an_eighth() -> None:
    rng = random.Random("share")
    drawn = ["".join(rng.choice("0123456789") for _ in range(6)) for _ in range(4000)]
    assert 0.10 < sum(task.split_of(e) == "eval" for e in drawn) / len(drawn) < 0.15


def test_problems_depend_on_the_seed_alone(tmp_path: Path) -> None:
    """Not on the process and not on PYTHONHASHSEED."""
    assert sample(seed="a") == sample(seed="a") != sample(seed="b")
    script = tmp_path / "draw.py"
    script.write_text(
        "import random\nfrom itertools import islice\nfrom iwopd.tiny import task\n"
        "print(*islice(task.problems(6, 'eval', random.Random('x')), 5))\n"
        "print(task.mixed_solution('1+2*3-4*5', 0.5, random.Random('x')).replace(chr(10), ' '))\n"
    )
    env = {"PYTHONPATH": ":".join(p for p in sys.path if p)}
    texts = {
        subprocess.run(
            [sys.executable, script], env={**env, "PYTHONHASHSEED": h}, capture_output=True, text=True, check=True
        ).stdout
        for h in ("0", "1")
    }
    here = " ".join(sample(6, "eval", 5, "x"))
    assert {text.splitlines()[0] for text in texts} == {here}
    assert len(texts) == 1


def test_distinct_problems_grow_in_place_and_run_out_with_a_message() -> None:
    some = task.distinct_problems(6, "eval", random.Random("s"), 50)
    more = task.distinct_problems(6, "eval", random.Random("s"), 200)
    assert more[:50] == some
    assert len(set(more)) == 200
    with pytest.raises(ValueError, match=r"only \d+ different eval problems with 3 operands"):
        task.distinct_problems(3, "eval", random.Random("s"), 10_000)


@pytest.mark.parametrize("operands", [2, 17])
def test_operands_out_of_range_are_refused(operands: int) -> None:
    with pytest.raises(ValueError, match=f"got {operands}"):
        next(task.problems(operands, "train", random.Random(0)))


@pytest.mark.parametrize(
    ("response", "right"),
    [
        (EXAMPLE_SOLUTION, True),
        ("\\boxed{0}", True),
        ("\\boxed{3}\n\\boxed{0}", True),
        ("\\boxed{0}\n\\boxed{3}", False),
        ("\\boxed{0}\\boxed{", True),
        ("\\boxed{00}", False),
        ("\\boxed{10}", False),
        ("\\boxed{}", False),
        ("boxed{0}", False),
        ("0", False),
        ("", False),
        ("\\boxed{" * 500, False),
        ("}{\\boxed}\ud800\x00", False),
        ("\\boxed{٠}", False),
    ],
)
def test_the_last_box_decides(response: str, right: bool) -> None:
    assert task.check(f"{EXAMPLE}?", response) is right
    assert task.check(EXAMPLE, response) is right


@pytest.mark.parametrize("prompt", ["", "?", "9+", "9+3??", "what is 9+3?", "9 + 3", "12+3"])
def test_a_prompt_without_an_expression_is_an_error(prompt: str) -> None:
    with pytest.raises(ValueError, match="not an expression"):
        task.check(prompt, "\\boxed{2}")
