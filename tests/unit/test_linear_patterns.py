"""Every regular expression of the package takes linear time, whatever a model writes. New ones are found by themselves."""

from __future__ import annotations

import ast
import importlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import iwopd
from iwopd.data.thinking import strip_thinking
from iwopd.eval.boxed import last_boxed
from iwopd.eval.fences import defines, extract_code
from iwopd.http_clients import _spellings
from iwopd.report.text import printable
from iwopd.tiny.task import check
from iwopd.train.thinking import ThinkingTokens
from iwopd.types import Prompt, Rollout
from models import byte_tokenizer

SOURCE = Path(iwopd.__file__).parent
LENGTH = 200_000
NOT_OF_MODELS = {
    "iwopd.data.fields": "sees the filter in the settings",
    "iwopd.train.checkpoint": "sees names of folders",
    "iwopd.cluster": "sees settings, names of folders and verl's logs",
    "iwopd.analysis.tables": "sees names of tasks and the command line",
    "iwopd.commands": "sees the command line",
}
MADE_OF_NAMES = {"iwopd.eval.fences": 1, "iwopd.http_clients": 1, "iwopd.train.doctor.data": 1}
"""Expressions put together at run time, how many: `defines` and a key's spellings are tested below, one is a literal text."""
METHODS = {"sub", "subn", "search", "match", "fullmatch", "findall", "finditer", "split"}
NAMED = ("```python", "python", " ", "-", "{", "\\", "1")
"""Fed at full length to every pattern; the others at a tenth of it first, which is enough to see who is slow."""
WORDS = (
    "```", "\t", "\n", "\n ", "}", "{}", "[", "(", "\\\\", "$", "\\%", "1.", "1 ", ",000", "1 000", "1\\,", "~", "a", "^",
    "< ", "<think", "</think>", "\\boxed", "\\boxed{", "\\framebox[", "\\framebox ", "\\text{", "\\text{ ", "\\sqrt\\",
    ".\\overline{1", "\\dot", "\\log_{ ", "def ", "=", "#### ", "\ud800",
)  # fmt: skip


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        text = path.read_text()
        if re.search(r"^\s*import re$", text, re.MULTILINE) and not any(name.startswith(seen) for seen in NOT_OF_MODELS):
            yield name, ast.parse(text)


def _compiled(value: Any) -> Iterator[re.Pattern[str]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _compiled(item)


def _uses(tree: ast.Module, name: str) -> set[str]:
    """The methods that are called on a pattern of that name; `sub` where it is one of a list."""
    found = {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
        if node.func.value.id == name and node.func.attr in METHODS
    }
    return found or {"sub"}


def _patterns() -> Iterator[tuple[str, re.Pattern[str], set[str]]]:
    for module, tree in _modules():
        for name, value in vars(importlib.import_module(module)).items():
            for number, pattern in enumerate(_compiled(value)):
                yield f"{module}.{name}-{number}", pattern, _uses(tree, name)
        for node in ast.walk(tree):  # re.sub("...", text)
            match node:
                case ast.Call(ast.Attribute(ast.Name("re"), method), [ast.Constant(str(text)), *_]) if method in METHODS:
                    yield f"{module}:{node.lineno}", re.compile(text), {method}
    for path in sorted((SOURCE / "report" / "assets").glob("*.js")):
        for number, literal in enumerate(
            re.findall(r"(?:replace|split|match|test|search)\(/((?:[^/\\\n]|\\.)+)/", path.read_text())
        ):
            yield f"{path.name}-{number}", re.compile(literal), {"sub"}


PATTERNS = list(_patterns())


def _texts(pattern: str) -> Iterator[tuple[str, str]]:
    """Repetitions of one word, with an end that spoils a match, after the beginning of a match where there is one."""
    own = [word for word in re.findall(r"[a-zA-Z]{2,}|`+|<0x", pattern) if len(word) < 20]
    for word in (*NAMED, *WORDS, *own):
        yield "", word
    for head in ("5", "5.", "\\boxed", "\\text{", "\\sqrt", "def", *own):
        for word in (" ", "1", "a"):
            yield head, word


def _feed(work: Callable[[str], object], pattern: str) -> None:
    for head, word in _texts(pattern):
        began = time.thread_time()
        if word not in NAMED:
            _within_a_second(work, head + word * (LENGTH // 10 // len(word)) + "\x01")
        if word in NAMED or time.thread_time() - began > 0.02:
            _within_a_second(work, head + word * (LENGTH // len(word)) + "\x01")


class _Slow(BaseException):
    pass


def _within_a_second(work: Callable[[str], object], text: str) -> None:
    def stop(*_: object) -> None:
        raise _Slow

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, 1.0)  # CPU time; Python's engine looks for signals while it matches
    try:
        work(text)
    except _Slow:
        pytest.fail(f"more than a CPU second for {len(text)} characters: {text[:30]!r}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def test_patterns_are_found() -> None:
    found = " ".join(name for name, _, _ in PATTERNS)
    for known in (
        "boxed._BOX",
        "thinking.TAG",
        "fences._OPENING",
        "math_worker._REWRITES",
        "tiny.task._BOXED",
        "tokens.js",
    ):
        assert known in found, f"{known} is not among {found}"


def test_patterns_put_together_at_run_time_are_few() -> None:
    found = {}
    for module, tree in _modules():
        inside = [
            node
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef)
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
            if node.func.value.id == "re" and node.func.attr in METHODS | {"compile"}
            if not (node.args and isinstance(node.args[0], ast.Constant))
        ]
        if inside:
            found[module] = len(inside)
    assert found == MADE_OF_NAMES


@pytest.mark.parametrize(("pattern", "methods"), [pytest.param(*rest, id=name) for name, *rest in PATTERNS])
def test_every_pattern_is_linear(pattern: re.Pattern[str], methods: set[str]) -> None:
    for method in methods:
        work = {
            "finditer": lambda text: sum(1 for _ in pattern.finditer(text)),
            "sub": lambda text: pattern.sub("", text),
        }.get(method) or getattr(pattern, method)
        _feed(work, pattern.pattern)


@pytest.mark.parametrize("word", ["<think></think>", "<think>a</think>b", "<think>", "</think>", "a"])
def test_finding_the_tokens_of_thinking_is_linear(word: str) -> None:
    """Blocks without end in one answer, a token for each letter."""
    find = ThinkingTokens(byte_tokenizer())
    ids = {piece[0]: number for number, piece in find._bytes.items() if len(piece) == 1}
    answers = {}
    for length in (LENGTH // 1000, LENGTH):
        text = (word * (length // len(word))).encode()
        answers[text.decode()] = Rollout(
            Prompt("p", (3,)), torch.tensor([ids[one] for one in text]), torch.zeros(len(text)), "length"
        )
    for answer, rollout in answers.items():
        _within_a_second(lambda text: find.mask(answers[text]), answer)
        assert int((~find.mask(rollout)).sum()) == len(strip_thinking(answer))


@pytest.mark.parametrize(
    "read",
    [
        last_boxed,
        strip_thinking,
        extract_code,
        lambda text: extract_code(text, "solve"),
        lambda text: defines(text, "def"),
        lambda text: _spellings("solve-1").sub("", text),
        lambda text: check("1+1", text),
        printable,
    ],
    ids=["last_boxed", "strip_thinking", "extract_code", "extract_code-named", "defines", "spellings", "tiny", "printable"],
)
def test_readers_of_answers_are_linear(read: Callable[[str], object]) -> None:
    _feed(read, "solve def```")
