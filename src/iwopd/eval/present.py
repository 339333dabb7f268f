"""The table that `iwopd eval` prints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from iwopd.eval.statistics import interval_over_problems


def print_results(results: Mapping[str, Mapping[str, Any]], out: Path, *, as_json: bool) -> None:
    """A table, or one JSON object as the last line."""
    console = Console(stderr=as_json)
    table = Table(title="Accuracy in percent, 95 % intervals over problems", title_justify="left")
    for column in ("task", "problems", "protocol", "score", "outcomes", "cut off", "tokens"):
        table.add_column(column, justify="right" if column in ("problems", "score", "cut off", "tokens") else "left")
    summary: dict[str, dict[str, Any]] = {}
    for name, result in results.items():
        scores = torch.tensor(result["scores"], dtype=torch.float64)
        interval = interval_over_problems([scores.mean(1)]).times(100)
        table.add_row(
            Text(name),
            str(len(scores)),
            result["aggregate"],
            f"{interval:.1f}",
            ", ".join(f"{number} {status}" for status, number in result["outcomes"].items()),
            f"{100 * result['truncated'] / scores.numel():.0f} %",
            f"{result['mean_tokens']:.0f}",
        )
        summary[name] = {key: round(value, 2) for key, value in interval._asdict().items()}
        summary[name] |= {"problems": len(scores), "samples": scores.shape[1]}
        summary[name] |= {key: result[key] for key in ("outcomes", "truncated", "sandbox") if key in result}
    console.print(table)
    for name, result in results.items():
        if "sandbox" in result:
            console.print(Text(f"{name}: sandbox {result['sandbox']}", style="red" if "unsafe" in result["sandbox"] else ""))
    console.print(Text(f"samples and results: {out}"))
    if as_json:
        print(json.dumps({"tasks": summary, "out": str(out)}))
