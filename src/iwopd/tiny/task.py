r"""The task of the embedded world: the last digit of an arithmetic expression, with order of operations.

    problem    9+3+7+5*4+1              digits and operators, everything modulo 10
    solution   5*4=0;9+3+7+0+1          one reduction per line, then the remaining expression
               9+3=2;2+7+0+1
               2+7=9;9+0+1
               9+0=9;9+1
               9+1=0;0
               \boxed{0}

A right solution reduces the leftmost `*` first, and the leftmost operator once there is no `*`. A wrong one works from left
to right. Only problems where the two give different results are kept, so one early wrong line usually
costs the answer: a small model of a long chain of reasoning. All solutions of a problem have the same number of tokens.

Randomness comes from `random.Random` seeded with text, which is the same on every machine and in every process.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator
from typing import Literal

EXPLANATION = (
    "Each problem is an expression of digits; wanted is the last digit of its value, products before sums. Everything is "
    "worked out modulo 10, so 4*3=2 is right (12 ends in 2), and so is 2-5=7. A line does one operation, then comes what is "
    "left of the expression. The usual mistake is to work from left to right: one such line early on costs the answer."
)
"""The task for somebody who sees its answers for the first time."""

Split = Literal["train", "eval"]

OPERATORS = "+-*"
MULTIPLY = 0.4
"""Probability of `*` at each operator of a problem; `+` and `-` share the rest."""
EVAL_SHARE = 8
"""One expression in this many belongs to the evaluation split."""
MIN_OPERANDS, MAX_OPERANDS = 3, 16
"""With two operands the order of operations makes no difference."""
_REPEATS = 20_000
"""After this many consecutive repeats the problems of a split count as exhausted."""
_EXPRESSION = re.compile(r"[0-9](?:[+*-][0-9])*")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


def answer(expression: str) -> str:
    """The right last digit: products first, then sums."""
    total, sign = 0, 1
    for part in re.split(r"([+-])", _checked(expression)):
        if part in ("+", "-"):
            sign = 1 if part == "+" else -1
        else:
            product = 1
            for digit in part.split("*"):
                product *= int(digit)
            total += sign * product
    return str(total % 10)


def check(prompt_text: str, response_text: str) -> bool:
    r"""Whether the last complete `\boxed{...}` of the response holds the right last digit of the prompt's expression.

    The response may be anything. The prompt must be an expression, with or without the `?` of the chat template.
    """
    right = answer(prompt_text.removesuffix("?"))
    return _BOXED.findall(response_text)[-1:] == [right]


def right_solution(expression: str) -> str:
    """The solution by the order of operations."""
    return _solution(expression, lambda _: True)


def left_to_right_solution(expression: str) -> str:
    """The solution that ignores the order of operations."""
    return _solution(expression, lambda _: False)


def mixed_solution(expression: str, precedence: float, rng: random.Random, *, sure: int = 0) -> str:
    """A solution in which each line independently respects the order of operations with probability `precedence`.

    Lines with at most `sure` operands always do.
    """
    return _solution(expression, lambda operands: operands <= sure or rng.random() < precedence)


def response_tokens(operands: int) -> int:
    """Tokens of every solution with this many operands, end-of-sequence included: 64 for 6, 102 for 8."""
    return (operands - 1) * (operands + 6) + 4


def split_of(expression: str) -> Split:
    """Which split an expression belongs to. It depends on its hash alone, so the splits are disjoint for all seeds."""
    return "eval" if hashlib.sha256(f"iwopd/tiny/{expression}".encode()).digest()[0] % EVAL_SHARE == 0 else "train"


def problems(operands: int, split: Split, rng: random.Random) -> Iterator[str]:
    """An endless stream of problems of one split, repeats possible."""
    if not MIN_OPERANDS <= operands <= MAX_OPERANDS:
        raise ValueError(f"operands must be between {MIN_OPERANDS} and {MAX_OPERANDS}, got {operands}")
    while True:
        expression = rng.choice("0123456789")
        for _ in range(operands - 1):
            expression += ("*" if rng.random() < MULTIPLY else rng.choice("+-")) + rng.choice("0123456789")
        if split_of(expression) == split and _left_to_right_value(expression) != answer(expression):
            yield expression


def distinct_problems(operands: int, split: Split, rng: random.Random, count: int) -> list[str]:
    """The first `count` different problems of the stream, in its order: a shorter list is a prefix of a longer one."""
    found: dict[str, None] = {}
    repeats = 0
    stream = problems(operands, split, rng)
    while len(found) < count:
        expression = next(stream)
        repeats = repeats + 1 if expression in found else 0
        if repeats > _REPEATS:
            raise ValueError(
                f"only {len(found)} different {split} problems with {operands} operands were found, {count} were asked for; "
                "ask for fewer or for more operands"
            )
        found[expression] = None
    return list(found)


def _checked(expression: str) -> str:
    if not _EXPRESSION.fullmatch(expression):
        raise ValueError(f"not an expression of digits and {OPERATORS!r}: {expression!r}")
    return expression


def _reduce(left: str, operator: str, right: str) -> str:
    a, b = int(left), int(right)
    return str((a * b if operator == "*" else a + b if operator == "+" else a - b) % 10)


def _left_to_right_value(expression: str) -> str:
    value = expression[0]
    for i in range(1, len(expression), 2):
        value = _reduce(value, expression[i], expression[i + 1])
    return value


def _solution(expression: str, respect_precedence: Callable[[int], bool]) -> str:
    """The worked solution; `respect_precedence` is called once per line, with the number of operands left."""
    left = list(_checked(expression))
    lines = []
    while len(left) > 1:
        first = left.index("*") if respect_precedence(len(left) // 2 + 1) and "*" in left else 1
        step = left[first - 1 : first + 2]
        left[first - 1 : first + 2] = [_reduce(*step)]
        lines.append(f"{''.join(step)}={left[first - 1]};{''.join(left)}")
    return "\n".join([*lines, f"\\boxed{{{left[0]}}}"])
