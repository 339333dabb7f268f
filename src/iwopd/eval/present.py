"""What `iwopd eval` shows: progress with rate and time left, then a table."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from iwopd.eval.statistics import bootstrap_interval


class ConsoleProgress:
    """A bar a task on a terminal, a line now and then elsewhere; on stderr, so that stdout stays clean."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self.live = console.is_terminal
        self.bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self.ids: dict[str, TaskID] = {}
        self.state: dict[str, dict[str, float]] = {}

    def __enter__(self) -> Self:
        if self.live:
            self.bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.live:
            self.bars.stop()

    def start(self, task: str, total: int, done: int) -> None:
        self.ids[task] = self.bars.add_task(task, total=total, completed=done, rate="")
        self.state[task] = {"total": total, "done": done, "fresh": 0, "tokens": 0, "began": time.perf_counter(), "said": 0.0}
        if done and not self.live:
            print(f"{task}: {done} of {total} samples were there already", file=sys.stderr, flush=True)

    def advance(self, task: str, samples: int, tokens: int) -> None:
        state = self.state[task]
        state["fresh"] += samples
        state["tokens"] += tokens
        seconds = time.perf_counter() - state["began"]
        rate = f"{state['tokens'] / seconds:.0f} tok/s" if seconds > 0 else ""
        self.bars.update(self.ids[task], advance=samples, rate=rate)
        now = time.perf_counter()
        count = state["done"] + state["fresh"]
        if not self.live and (now - state["said"] > 5 or count >= state["total"]):
            left = seconds / state["fresh"] * max(0.0, state["total"] - count)
            print(
                f"{task}: {count:.0f}/{state['total']:.0f} samples, {rate}, about {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )
            state["said"] = now


def print_results(results: Mapping[str, Mapping[str, Any]], out: Path, *, as_json: bool) -> None:
    """A table, or one JSON object as the last line."""
    console = Console(stderr=as_json)
    table = Table(title="Accuracy in percent, 95 % intervals over problems", title_justify="left")
    for column in ("task", "problems", "protocol", "score", "outcomes", "cut off", "tokens"):
        table.add_column(column, justify="right" if column in ("problems", "score", "cut off", "tokens") else "left")
    summary = {}
    for name, result in results.items():
        scores = torch.tensor(result["scores"], dtype=torch.float64)
        mean, low, high = (100 * value for value in bootstrap_interval(scores))
        count = scores.numel()
        statuses = ", ".join(f"{number} {status}" for status, number in result["outcomes"].items())
        table.add_row(
            Text(name),
            str(len(scores)),
            result["aggregate"],
            f"{mean:.1f} ({low:.1f} to {high:.1f})",
            statuses,
            f"{100 * result['truncated'] / count:.0f} %",
            f"{result['mean_tokens']:.0f}",
        )
        summary[name] = {
            "mean": round(mean, 2),
            "low": round(low, 2),
            "high": round(high, 2),
            "problems": len(scores),
            "samples": scores.shape[1],
            "outcomes": result["outcomes"],
            "truncated": result["truncated"],
        }
    console.print(table)
    console.print(Text(f"samples and results: {out}"))
    if as_json:
        print(json.dumps({"tasks": summary, "out": str(out)}))
