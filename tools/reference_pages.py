"""Pages of the reference: commands from the parser, settings from their tree, the API from docstrings."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from iwopd import cli
from iwopd.config import settings

WIDTH = 100
Page = tuple[str, str, dict[str, tuple[str, ...]]]
API: dict[str, Page] = {
    "algo": (
        "Algorithms",
        "Pure functions on tensors: call them from your own trainer. [The method](../method.md) has their formulas.",
        {
            "Weights": ("iwopd.algo.weights", "iwopd.algo.drift_weights", "iwopd.algo.related_weights"),
            "Advantages": ("iwopd.algo.advantages", "iwopd.algo.shaped_advantages", "iwopd.algo.rewards"),
            "Losses": ("iwopd.algo.loss", "iwopd.algo.fused_loss", "iwopd.algo.divergences", "iwopd.algo.fused_divergence"),
            "Log-probs": ("iwopd.algo.logprobs", "iwopd.algo.views", "iwopd.algo.correction", "iwopd.algo.noise"),
            "Along an answer": (
                *("iwopd.algo.position", "iwopd.algo.drift", "iwopd.algo.agreement"),
                *("iwopd.algo.spans", "iwopd.algo.projection"),
            ),
            "What a method is made of": (
                *("iwopd.algo.evidence", "iwopd.algo.registry", "iwopd.algo.objectives.base"),
                *("iwopd.algo.objectives.policy_gradient", "iwopd.algo.objectives.divergence"),
            ),
        },
    ),
    "types": ("Types", "What flows through a training step.", {"Objects": ("iwopd.types",)}),
    "config": (
        "Configuration",
        "Recipes in Python. [Settings](settings.md) lists every setting by its dotted name.",
        {"Reading recipes": ("iwopd.config.reading",), "The tree": ("iwopd.config.tree", "iwopd.config.method")},
    ),
    "entry-points": (
        "Entry points",
        "What the commands call.",
        {
            "Training": ("iwopd.train.run.run_training", "iwopd.methods"),
            "Probing": ("iwopd.analysis.probe", "iwopd.analysis.pair_probe"),
            "Evaluating": ("iwopd.eval.runner", "iwopd.eval.task", "iwopd.eval.statistics"),
            "Reading runs": ("iwopd.runs.reading", "iwopd.report.page.write_report"),
            "The embedded worlds": ("iwopd.tiny.world",),
        },
    ),
}


def reference_pages() -> dict[str, str]:
    """All pages by the name of their file."""
    api = {f"{name}.md": api_page(*page) for name, page in API.items()}
    return {"commands.md": commands_page(), "settings.md": settings_page(), **api}


def subcommands() -> dict[str, argparse.ArgumentParser]:
    """The parser of every command."""
    (choices,) = (action.choices for action in cli._parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(choices)


def commands_page() -> str:
    parsers = subcommands()
    listed = [f"| [`iwopd {name}`](#iwopd-{name}) | {_cell(_help_line(name))} |" for name in parsers]
    parts = [
        "# Commands",
        "Made from the parser: what `iwopd COMMAND --help` says.",
        "| command | |\n| --- | --- |\n" + "\n".join(listed),
    ]
    for name, parser in parsers.items():
        parts += [f"## iwopd {name}", *_command(parser)]
        if name in ("train", "doctor", "plan"):
            parts.append("Every [setting](settings.md) is an option too: `--optim.lr 1e-4`.")
    return "\n\n".join(parts) + "\n"


def settings_page() -> str:
    """All settings, a table for each section of a recipe."""
    parts = [
        "# Settings",
        (
            "A recipe is a TOML file of these; `iwopd train my.toml --optim.lr 1e-4` overrides one by its dotted name. "
            "Sections of plug-ins and of methods (`[method.params]`) are those of "
            "[`iwopd methods`](commands.md#iwopd-methods) and [Extending](../extending.md)."
        ),
    ]
    for section, group in groupby(settings(), key=lambda one: one[0].rpartition(".")[0]):
        parts.append(f"## [{section}]" if section else "## Top level")
        rows = [f"| `{name}` | {_default(info)} | {_cell(info.description or '')} |" for name, info in group]
        parts.append("| setting | default | meaning |\n| --- | --- | --- |\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


def api_page(title: str, about: str, groups: dict[str, tuple[str, ...]]) -> str:
    parts = [f"# {title}", about]
    for heading, names in groups.items():
        parts += [f"## {heading}", *(f"::: {name}" for name in names)]
    return "\n\n".join(parts) + "\n"


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    description = (parser.description or "").strip()
    yield f"```text\n{description}\n```" if "\n\n" in description else " ".join(description.split())
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=WIDTH)
    yield f"```text\n{parser.format_usage().strip()}\n```"
    for group in parser._action_groups:
        rows = [_row(action, parser) for action in group._group_actions if action.help != argparse.SUPPRESS]
        if rows:
            named = group.title not in ("options", "positional arguments")
            head = str(group.title) if named else "argument" if group.title == "positional arguments" else "option"
            yield f"| {_cell(head)} | |\n| --- | --- |\n" + "\n".join(rows)
    if parser.epilog:
        yield f"```text\n{parser.epilog.strip()}\n```"


def _row(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    formatter = argparse.HelpFormatter(parser.prog, width=WIDTH)
    invocation = formatter._format_action_invocation(action)
    words = formatter._expand_help(action) if action.help else ""
    return f"| `{invocation.replace('|', chr(92) + '|')}` | {_cell(words)} |"


def _help_line(name: str) -> str:
    (parsers,) = (action for action in cli._parser()._actions if isinstance(action, argparse._SubParsersAction))
    return next(choice.help or "" for choice in parsers._choices_actions if choice.dest == name)


def _default(info: Any) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    return "" if value is None or value == "" else f"`{value}`".replace("|", r"\|")


def _cell(text: str) -> str:
    """As a cell of a table, in which a `|` and a `<` are to be seen."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")
