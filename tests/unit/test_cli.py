"""The command line answers quickly: help, version and mistakes need no torch."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from iwopd import cli

HEAVY = ("torch", "transformers", "numpy", "rich", "httpx", "sympy", "huggingface_hub")
SECONDS = 0.5
RECIPE = str(Path(__file__).parents[2] / "src" / "iwopd" / "recipes" / "tiny" / "opd.toml")
RUNNER = f"""
import json, resource, sys
from iwopd.cli import main
try:
    main()
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    heavy = [name for name in {HEAVY} if name in sys.modules]
    print(json.dumps([heavy, used.ru_utime + used.ru_stime]), file=sys.stderr)
"""


def run(*words: str) -> tuple[subprocess.CompletedProcess[str], list[str], float]:
    done = subprocess.run([sys.executable, "-c", RUNNER, *words], capture_output=True, text=True, check=False)
    heavy, seconds = json.loads(done.stderr.splitlines()[-1])
    return done, heavy, seconds


def commands() -> dict[str, argparse.ArgumentParser]:
    (choices,) = (action.choices for action in cli._parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(choices)


def quick(*words: str) -> subprocess.CompletedProcess[str]:
    """Run it: no heavy import, and under half a second of CPU (the best of three, for a busy machine)."""
    used = []
    for _ in range(3):
        done, heavy, seconds = run(*words)
        assert heavy == [], f"iwopd {' '.join(words)} imports {heavy}"
        used.append(seconds)
        if seconds < SECONDS:
            return done
    raise AssertionError(f"iwopd {' '.join(words)} took {min(used):.2f} CPU seconds")


def test_help_and_version_are_quick_and_help_lists_every_command() -> None:
    text = quick("--help").stdout
    for name in commands():
        assert f"\n    {name} " in text.replace("\n      ", " \n      ")
    assert quick("--version").stdout.startswith("iwopd ")


@pytest.mark.parametrize("command", sorted(commands()))
def test_the_help_of_every_command_is_quick(command: str) -> None:
    done = quick(command, "--help")
    assert done.returncode == 0
    assert f"usage: iwopd {command}" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required: COMMAND"),
        (["trian"], "invalid choice: 'trian' (choose from"),
        (["eval"], "required: --model, --tasks"),
        (["eval", "--model", "m", "--tasks", "tiny", "--colour", "red"], "unknown argument '--colour'"),
        (["eval", "--model", "m", "--tasks", "tiny", "--dtype", "int3"], "invalid choice: 'int3'"),
        (["probe", "--limit", "many"], "invalid int value: 'many'"),
        (["check-code"], "check-code needs FILE"),
        (["train"], "required: recipe"),
        (["train", "no-such.toml"], "no recipe at no-such.toml"),
        (["train", RECIPE, "fast"], "do not know what to do with 'fast'"),
        (["train", RECIPE, "--optim.lr"], "--optim.lr needs a value"),
        (["train", RECIPE, "--optim.lrr", "1"], "did you mean 'optim.lr'?"),
        (["train", RECIPE, "--nodes", "2"], "--nodes goes with --engine verl"),
        (["doctor", RECIPE, "--optim.lrr", "1"], "did you mean 'optim.lr'?"),
        (["plan", RECIPE, "--optim.lrr", "1"], "did you mean 'optim.lr'?"),
    ],
)
def test_mistakes_are_answered_quickly(words: list[str], message: str) -> None:
    done = quick(*words)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_help_of_train_shows_defaults(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "-h"])
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith("  --optim.lr "))
    assert line.split()[1] == "1e-05"
