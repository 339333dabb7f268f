"""One seam for everything that wants to know how a run is going: JSONL always, a console, and trackers that people bring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from iwopd.config import Config, flatten
from iwopd.eval.runner import Evaluation
from iwopd.eval.task import outcomes
from iwopd.runs.alerts import Alert, AlertWatch
from iwopd.runs.directory import RunDirectory
from iwopd.trackers import TrackerBackend, open_tracker
from iwopd.train.display import Display, open_display
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
        display: Display | None = None,
    ) -> None:
        """`display` is one that is open already; whoever opened it closes it."""
        self.config, self.run, self.is_main = config, run, is_main
        self.display = display or open_display(config, console, is_main=is_main)
        self._own_display = display is None
        before = list(run.read("metrics.jsonl")) if after is not None and is_main else []
        self.alerts = AlertWatch(before)
        if before:
            self.display.before(before, list(run.read("evals.jsonl")))
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
        begun = self.alerts.step(record)
        self._log(stats.step, {**record, **self.alerts.flags()})
        for alert in begun:
            self._alert(stats.step, alert)
        self.display.alerts = self.alerts.active
        self.display.step(record)

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
            **({"mean_tokens": sum(map(len, rollouts)) / len(rollouts)} if (rollouts := evaluation.rollouts) else {}),
            "problem_ids": list(result.problem_ids),
            "scores": result.scores.tolist(),
        }
        if evaluation.sandbox:
            record["sandbox"] = evaluation.sandbox
        self.run.append("evals.jsonl", record)
        self._log(result.step or 0, {f"eval/{result.task}": result.mean})
        self.display.evaluation(record)

    def say(self, text: str) -> None:
        self.display.say(text)

    def close(self) -> None:
        if self._own_display:
            self.display.close()
        for backend in self.backends:
            backend.close()

    def _log(self, step: int, record: Mapping[str, Any]) -> None:
        numbers = {name: float(value) for name, value in record.items() if isinstance(value, (int, float)) and name != "step"}
        self._tell(lambda backend: backend.log(step, numbers))

    def _alert(self, step: int, alert: Alert) -> None:
        self.display.alert(alert)
        words = f"{alert.text} {alert.remedy}"

        def tell(backend: TrackerBackend) -> None:
            if callable(take := getattr(backend, "alert", None)):  # not every tracker takes words
                take(step, alert.title, words)

        self._tell(tell)

    def _tell(self, tell: Callable[[TrackerBackend], None]) -> None:
        for backend in list(self.backends):
            try:
                tell(backend)
            except Exception as error:  # the run matters more than who follows it
                self.backends.remove(backend)
                self.say(f"the tracker {type(backend).__name__} failed and gets no more numbers: {error!r}")
