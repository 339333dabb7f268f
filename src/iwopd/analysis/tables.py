"""A comparison as a terminal table, Markdown, LaTeX (the paper's layout) or JSON. Numbers are points, 0 to 100.

Names of methods, students, tasks and folders come from files and command lines: each format escapes them in its own way.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import iwopd
from iwopd.analysis.compare import AVERAGE, Comparison, Difference
from iwopd.analysis.wording import percent, points, sentence, show_p, title, verdict
from iwopd.eval.statistics import Interval

PAPER = {
    "Math": {"aime24": "AIME24", "aime25": "AIME25", "hmmt25": "HMMT25"},
    "Code": {"humanevalplus": "HE+", "mbppplus": "MBPP+"},
}
"""The paper's columns, by task names without signs (`humaneval+`, `humaneval-plus` and `humaneval_plus` are one)."""

IN_WORDS = ("student", "method", "difference", "task", "verdict")
"""Columns of words; the others are numbers."""


def print_comparison(comparison: Comparison, console: Console) -> None:
    for title_, (heads, rows) in _both_tables(comparison).items():
        table = Table(title=title_, title_justify="left")
        for head in heads:
            table.add_column(Text(plain(head)), justify="left" if head in IN_WORDS else "right", overflow="fold")
        for row in rows:
            table.add_row(*(Text(plain(word)) for word in row))
        console.print(table)
    for difference in comparison.differences:
        console.print(Text(plain(sentence(difference, comparison))))
    for note in comparison.notes:
        console.print(Text(plain(f"Note: {note}"), style="yellow"))


def markdown(comparison: Comparison) -> str:
    lines: list[str] = []
    for title_, (heads, rows) in _both_tables(comparison).items():
        ruler = [":---" if number < 2 else "---:" for number in range(len(heads))]
        head, *body = [[escape_markdown(cell) for cell in row] for row in (heads, *rows)]
        lines += [title_, "", *(f"| {' | '.join(row)} |" for row in (head, ruler, *body)), ""]
    lines += [f"- {escape_markdown(sentence(d, comparison))}" for d in comparison.differences]
    if comparison.notes:
        lines += ["", *(f"> Note: {escape_markdown(note)}\n>" for note in comparison.notes)]
        lines[-1] = lines[-1].removesuffix("\n>")
    return "\n".join(lines) + "\n"


def latex(comparison: Comparison) -> str:
    """The paper's table: Student x Method, math | code | Avg. Needs the packages booktabs and multirow."""
    shown = columns(comparison)
    areas = {name: [task for task in shown if task != AVERAGE and area(task) == name] for name in (*PAPER, "")}
    blocks = {name: tasks for name, tasks in areas.items() if tasks}
    average = [AVERAGE] if AVERAGE in shown else []
    flat = [task for tasks in blocks.values() for task in tasks]
    layout = "ll" + "".join("|" + "c" * len(tasks) for tasks in blocks.values()) + "|c" * len(average)
    ends = ["|"] * (len(blocks) - 1) + ["|" if average else ""]
    first = [rf"\multirow{{2}}{{*}}{{\textbf{{{head}}}}}" for head in ("Student", "Method")]
    for (name, tasks), end in zip(blocks.items(), ends, strict=True):
        first.append(rf"\multicolumn{{{len(tasks)}}}{{c{end}}}{{\textbf{{{name}}}}}" if name else " & ".join([""] * len(tasks)))
    first += [rf"\multirow{{2}}{{*}}{{\textbf{{{head}}}}}" for head in average]
    titles = [escape_latex(task_title(task)) for task in flat]
    heads = [" & ".join(first), " & ".join(["", "", *titles, *("" for _ in average)]).strip()]
    if not any(blocks):  # no areas: tasks are named in the only row
        heads = [" & ".join([r"\textbf{Student}", r"\textbf{Method}", *titles, *(rf"\textbf{{{head}}}" for head in average)])]
    lines = [
        "% made by `iwopd compare`; needs \\usepackage{booktabs,multirow}",
        r"\begin{table}[t]",
        r"\centering",
        rf"\caption{{{_caption(comparison)}}}",
        rf"\begin{{tabular}}{{{layout}}}",
        r"\toprule",
        *(f"{head} " + r"\\" for head in heads),
    ]
    for student, places in _students(comparison).items():
        lines.append(r"\midrule")
        for number, place in enumerate(places):
            head = rf"\multirow{{{len(places)}}}{{*}}{{{escape_latex(student or '--')}}}" if number == 0 else ""
            cells = [_latex_cell(comparison, place, task, places) for task in (*flat, *average)]
            lines.append(" & ".join([head, _latex_name(comparison.groups[place].name), *cells]).strip() + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}", *(f"% note: {plain(note)}" for note in comparison.notes)]
    return "\n".join(lines) + "\n"


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Everything, unrounded; differences and scores in points."""
    return {
        "format": 1,
        "iwopd": iwopd.__version__,
        "metric": str(comparison.metric),
        "level": comparison.level,
        "unit": "points",
        "tasks": list(comparison.tasks),
        "groups": [_group_json(place, comparison) for place in range(len(comparison.groups))],
        "differences": [_difference_json(difference, comparison) for difference in comparison.differences],
        "notes": list(comparison.notes),
    }


def render(comparison: Comparison, form: str) -> str:
    """The text of `markdown`, `latex` or `json`."""
    if form == "json":
        return json.dumps(as_json(comparison), indent=2, allow_nan=False) + "\n"
    return latex(comparison) if form == "latex" else markdown(comparison)


# --- names and order -------------------------------------------------------------------------------------------------


def task_title(task: str) -> str:
    known = {key: name for names in PAPER.values() for key, name in names.items()}
    return known.get(_key(task), task)


def area(task: str) -> str:
    return next((name for name, tasks in PAPER.items() if _key(task) in tasks), "")


def columns(comparison: Comparison) -> list[str]:
    """Tasks in the paper's order, then the others as they came, then Avg if there is one."""
    rank = [key for names in PAPER.values() for key in names]
    tasks = sorted(comparison.tasks, key=lambda task: rank.index(_key(task)) if _key(task) in rank else len(rank))
    return [*tasks, *([AVERAGE] if any(task == AVERAGE for _, task in comparison.scores) else [])]


def _key(task: str) -> str:
    return re.sub(r"[-_ ]", "", task.lower().replace("+", "plus"))


def _students(comparison: Comparison) -> dict[str | None, list[int]]:
    found: dict[str | None, list[int]] = {}
    for place, group in enumerate(comparison.groups):
        found.setdefault(group.student, []).append(place)
    return found


# --- escaping --------------------------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """Control characters (which could steer a terminal) and invisible ones become visible escapes."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in text)


def escape_markdown(text: str) -> str:
    text = plain(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]|~$!])", r"\\\1", text)


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "−": "$-$",
    **{char: f"\\{char}" for char in "&%$#_{}"},
}


def escape_latex(text: str) -> str:
    return "".join(_LATEX.get(char, char) for char in plain(text))


# --- cells -----------------------------------------------------------------------------------------------------------


def _score(comparison: Comparison, place: int, task: str) -> str:
    score = comparison.scores.get((place, task))
    if score is None:
        return "–"
    return f"{100 * score.interval.mean:.1f}" if math.isnan(score.interval.low) else f"{score.interval.times(100):.1f}"


def _both_tables(comparison: Comparison) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Title: headings and rows, of scores and of differences."""
    shown, level = columns(comparison), percent(comparison.level)
    scores = []
    for place in (place for places in _students(comparison).values() for place in places):
        group = comparison.groups[place]
        cells = [_score(comparison, place, task) for task in shown]
        units = [str(len(set(group.units)))] if comparison.unit else []
        scores.append([group.student or "–", group.name, *units, str(len(group.members)), *cells])
    named = ["student", "method", *(["units", "runs"] if comparison.unit else ["seeds"])]
    several = ["Holm p"] if len(comparison.differences) > 1 else []
    heads = ["difference", "task", "points", "interval", "p", *several, "verdict"]
    return {
        f"{comparison.metric} in points, {level} intervals": ([*named, *map(task_title, shown)], scores),
        f"Differences in points, {level} intervals": (heads, [_cells(d, comparison) for d in comparison.differences]),
    }


def _cells(difference: Difference, comparison: Comparison) -> list[str]:
    low, high = difference.interval.low, difference.interval.high
    interval = "–" if difference.too_few else f"{points(low)} to {points(high)}"
    p_values = [difference.p_value, *([difference.holm] if len(comparison.differences) > 1 else [])]
    shown = ["–" if difference.too_few else show_p(p).removeprefix("= ") for p in p_values]
    head = [title(difference, comparison), task_title(difference.task)]
    return [*head, points(difference.interval.mean), interval, *shown, verdict(difference, comparison)]


def _caption(comparison: Comparison) -> str:
    mean = "mean over samples" if str(comparison.metric) == "mean" else str(comparison.metric)
    bases = ", ".join(dict.fromkeys(comparison.groups[place].name for place in comparison.baselines.values()))
    return escape_latex(
        f"{mean[0].upper()}{mean[1:]}, accuracy (%). Bold: the highest number of each student, which need not be "
        f"distinguishable from the next. Subscripts: paired difference to {bases}; a star marks those that are "
        f"distinguishable from noise at the {percent(1 - comparison.level)} level after Holm's correction."
    )


def _latex_name(name: str) -> str:
    """`OPD@10` is the paper's OPD with the step as a subscript."""
    found = re.fullmatch(r"(.+)@(\d{1,9})", name)
    return rf"{escape_latex(found[1])}$_{{{found[2]}}}$" if found else escape_latex(name)


def _latex_cell(comparison: Comparison, place: int, task: str, rivals: Sequence[int]) -> str:
    score = comparison.scores.get((place, task))
    if score is None:
        return "--"
    means = [comparison.scores[rival, task].interval.mean for rival in rivals if (rival, task) in comparison.scores]
    text = f"{100 * score.interval.mean:.1f}"
    if text == f"{100 * max(means):.1f}" and len(means) > 1:
        text = rf"\textbf{{{text}}}"
    group = comparison.groups[place]
    for difference in comparison.differences:
        if (difference.group, difference.student, difference.task) == (group.name, group.student, task):
            star = "^{*}" if verdict(difference, comparison) == "distinguishable from noise" else ""
            text += rf"$_{{{points(difference.interval.mean).replace('−', '-')}}}{star}$"
    return text


def _interval_json(interval: Interval) -> dict[str, float | None]:
    """A bound that does not exist is null."""
    return {name: None if math.isnan(value) else value for name, value in interval.times(100)._asdict().items()}


def _group_json(place: int, comparison: Comparison) -> dict[str, Any]:
    group, scores = comparison.groups[place], {}
    for (owner, task), score in comparison.scores.items():
        if owner == place:
            over_seeds = _interval_json(score.over_seeds) if score.over_seeds else None
            over = {"over_problems": _interval_json(score.over_problems), "over_seeds_and_problems": over_seeds}
            scores[task] = {**_interval_json(score.interval), **over}
            if score.over_units:
                scores[task]["over_units"] = _interval_json(score.over_units)
    return {
        "name": group.name,
        "student": group.student,
        "baseline": place in comparison.baselines.values(),
        "runs": [
            {"path": str(m.path), "seed": m.seed, "step": m.step, **({"unit": group.units[n]} if group.units else {})}
            for n, m in enumerate(group.members)
        ],
        "scores": scores,
    }


def _difference_json(d: Difference, comparison: Comparison) -> dict[str, Any]:
    unit = "multiples, seeds in numbers" if d.task == AVERAGE else "numbers"
    over_seeds = {**_interval_json(d.over_seeds), "p": d.p_seeds} if d.over_seeds else None
    return {
        **{name: getattr(d, name) for name in ("group", "baseline", "student", "task")},
        **_interval_json(d.interval),
        "p": d.p_value,
        "p_holm": d.holm,
        "verdict": verdict(d, comparison),
        "over_problems": {**_interval_json(d.over_problems), "p": d.p_problems},
        "over_seeds_and_problems": over_seeds,
        "over_units": {**_interval_json(d.over_units.interval), "p": d.over_units.p_value, "units": d.over_units.units}
        if d.over_units
        else None,
        "problems": d.problems,
        "differing_problems": d.differing,
        "samples": d.samples,
        "seeds": d.seeds,
        "noise_cancelled": d.cancelled,
        "needed_for_80_percent_power": [asdict(n) | {"difference": 100 * n.difference, "unit": unit} for n in d.needed],
        "sentence": sentence(d, comparison),
    }
