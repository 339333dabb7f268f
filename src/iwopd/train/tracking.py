"""One seam for everything that wants to know how a run is going: JSONL always, a console, and trackers that people bring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from iwopd.config import Config, flatten
from iwopd.eval.runner import Evaluation
from iwopd.eval.task import outcomes
from iwopd.runs.directory import RunDirectory
from iwopd.trackers import open_tracker
from iwopd.types import StepStats


class Tracker:
    """Fans out what the loop reports. On ranks other than the first it is silent.

    `after`: of a resumed run, the step that it goes on after; trackers may have heard of later ones from a process that died.
    """

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        *,
        after: int | None = None,
        is_main: bool = True,
        console: Console | None = None,
    ) -> None:
        self.config, self.run, self.is_main = config, run, is_main
        self.console = console or Console(stderr=True)
        self.view = _view(config, self.console) if is_main else None
        names, settings = config.tracking.trackers if is_main else [], dict(flatten(config.model_dump(mode="json")))
        self.facts: Mapping[str, float] = {}
        """What was measured before the first step: part of every step's record."""
        self.backends = [open_tracker(name, run.path, config.tracking.project, settings, after) for name in names]

    def step(self, stats: StepStats) -> None:
        if not self.is_main:
            return
        seconds = sum(stats.seconds.values())
        tokens = stats.metrics["rollout/length_mean"] * stats.rollouts if stats.rollouts else 0
        record: dict[str, Any] = {
            **{name: getattr(stats, name) for name in ("step", "loss", "grad_norm", "tokens", "rollouts", "skipped")},
            **{f"time/{name}": round(value, 6) for name, value in stats.seconds.items()},
            "time/step": seconds,
            "throughput/tokens_per_second": tokens / seconds if seconds else 0.0,
            **self.facts,
            **stats.metrics,
        }
        self.run.append("metrics.jsonl", record)
        self._log(stats.step, record)
        if self.view:
            self.view.step(record)

    def evaluation(self, evaluation: Evaluation, seconds: float) -> None:
        if not self.is_main:
            return
        result = evaluation.result
        record: dict[str, Any] = {
            "step": result.step,
            "task": result.task,
            "mean": result.mean,
            "problems": len(result.problem_ids),
            "samples": result.scores.shape[1],
            "outcomes": outcomes(verdict.status for verdict in evaluation.verdicts),
            "seconds": round(seconds, 3),
            "problem_ids": list(result.problem_ids),
            "scores": result.scores.tolist(),
        }
        if evaluation.sandbox:
            record["sandbox"] = evaluation.sandbox
        self.run.append("evals.jsonl", record)
        self._log(result.step or 0, {f"eval/{result.task}": result.mean})
        if self.view:
            self.view.evaluation(record)

    def say(self, text: str) -> None:
        if self.is_main and self.config.tracking.console != "off":
            self.console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self.view:
            self.view.close()
        for backend in self.backends:
            backend.close()

    def _log(self, step: int, record: Mapping[str, Any]) -> None:
        numbers = {name: float(value) for name, value in record.items() if isinstance(value, (int, float)) and name != "step"}
        for backend in list(self.backends):
            try:
                backend.log(step, numbers)
            except Exception as error:  # the run matters more than who follows it
                self.backends.remove(backend)
                self.say(f"the tracker {type(backend).__name__} failed and gets no more numbers: {error!r}")


class PlainView:
    """One line per step, for logs and pipes."""

    def __init__(self, config: Config, console: Console) -> None:
        self.steps, self.console = config.steps, console

    def step(self, record: Mapping[str, Any]) -> None:
        stages = " ".join(f"{name} {record[f'time/{name}']:.2f}s" for name in ("rollout", "teacher", "update"))
        if not record["rollouts"]:
            skipped = "  UPDATE SKIPPED" if record["skipped"] else ""
            head = f"step {record['step']}/{self.steps}  loss {record['loss']:+.4f}  grad {record['grad_norm']:.2f}"
            self._print(f"{head}{_others(record)}  {stages}{skipped}")
            return
        self._print(
            f"step {record['step']}/{self.steps}  loss {record['loss']:+.4f}  kl {record['kl/sampled']:.3f}  "
            f"|gap| {record['gap/abs_mean']:.3f}  weight {record['weights/mean']:.2f}  grad {record['grad_norm']:.2f}  "
            f"length {record['rollout/length_mean']:.0f}  cut {record['rollout/truncated']:.0%}  {stages}  "
            f"{record['throughput/tokens_per_second']:.0f} tok/s"
            + (f"  reward {record['reward/mean']:.3f}" if "reward/mean" in record else "")
            + _others(record)
            + ("  UPDATE SKIPPED" if record["skipped"] else "")
        )

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self._print(f"step {record['step']}/{self.steps}  {record['task']} {100 * record['mean']:.1f} %")

    def close(self) -> None:
        pass

    def _print(self, text: str) -> None:
        print(text, file=self.console.file, flush=True)


class LiveView:
    """A small table that stays in place."""

    def __init__(self, config: Config, console: Console) -> None:
        self.steps = config.steps
        self.latest: dict[str, Any] = {}
        self.scores: list[tuple[str, int, float]] = []
        self.live = Live(console=console, refresh_per_second=4, transient=False)
        self.live.start()

    def step(self, record: Mapping[str, Any]) -> None:
        self.latest = dict(record)
        self.live.update(self._table())

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self.scores.append((record["task"], record["step"], record["mean"]))
        self.live.update(self._table())

    def close(self) -> None:
        self.live.stop()

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        now = self.latest
        if now:
            done = now["step"] / self.steps
            left = now["time/step"] * (self.steps - now["step"])
            bar = "█" * round(20 * done) + "░" * (20 - round(20 * done))
            table.add_row("step", f"{now['step']}/{self.steps} {bar} about {left:.0f} s left")
            table.add_row("learning", f"loss {now['loss']:+.4f}   KL {now['kl/sampled']:.3f}   |gap| {now['gap/abs_mean']:.3f}")
            if others := _others(now):
                table.add_row("others", others.strip())
            if "reward/mean" in now:
                unjudged = f", {now['reward/failed']:.0f} without a verdict" if now["reward/failed"] else ""
                table.add_row("reward", f"{now['reward/mean']:.3f}{unjudged}")
            table.add_row("weights", f"{now['weights/mean']:.2f} ({now['weights/min']:.2f} to {now['weights/max']:.2f})")
            table.add_row("answers", f"{now['rollout/length_mean']:.0f} tokens, {now['rollout/truncated']:.0%} cut off")
            stages = "   ".join(f"{name} {now[f'time/{name}']:.2f} s" for name in ("rollout", "teacher", "update"))
            table.add_row("time", f"{stages}   {now['throughput/tokens_per_second']:.0f} tokens/s")
        for task in dict.fromkeys(task for task, _, _ in self.scores):
            line = [f"step {step}: {100 * mean:.1f} %" for name, step, mean in self.scores if name == task]
            table.add_row(Text(task), "   ".join(line[-5:]))
        return table


def _others(record: Mapping[str, Any]) -> str:
    """What others wrote in a step, in words; empty: nothing."""
    if not record.get("mix/share"):
        return ""
    return f"  others {record['mix/share']:.0%} (log-prob {record['mix/logprob']:.3f})"


def _view(config: Config, console: Console) -> PlainView | LiveView | None:
    choice = config.tracking.console
    if choice == "off":
        return None
    if choice == "live" or (choice == "auto" and console.is_terminal):
        return LiveView(config, console)
    return PlainView(config, console)
