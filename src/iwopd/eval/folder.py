"""The folder of an evaluation: every sample as it is finished, then the results. A re-run continues it.

eval.json              model, settings, and the results of finished tasks
samples-<task>.jsonl   one object per sample: id, sample, prompt (hash), text, status, score, answer, detail, tokens,
                       stop_reason; for code, the sandbox
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import iwopd
from iwopd.errors import UserError
from iwopd.eval.runner import Evaluation
from iwopd.eval.task import Task, outcomes
from iwopd.filesystem import write_atomic
from iwopd.runs.evaluations import EVAL_FORMAT, read_eval
from iwopd.runs.logs import listed, number, set_aside, split_lines
from iwopd.types import Prompt

log = logging.getLogger(__name__)


class EvaluationError(UserError, RuntimeError):
    """An evaluation that cannot continue as asked, and the remedy."""


class EvaluationFolder:
    """Owns one folder. `about` says what is evaluated: equal for every run that continues it."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.record: dict[str, Any] = {"format": EVAL_FORMAT, "iwopd": iwopd.__version__, **about, "tasks": {}}
        if (path / "eval.json").exists():
            self._continue(about)
        else:
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise EvaluationError(f"cannot make the folder {path}: {error.strerror}; choose another with --out") from None
            self._write()

    def _continue(self, about: Mapping[str, Any]) -> None:
        old = read_eval(self.path)
        settings, before = about["settings"], old.get("settings", {})
        changed = [f"{k}: {before.get(k)!r} -> {v!r}" for k, v in settings.items() if before.get(k) != v]
        changed += [f"{k}: {old.get(k)!r} -> {about[k]!r}" for k in ("model", "weights") if old.get(k) != about[k]]
        if changed and not any(self.path.glob("samples-*.jsonl")):  # an engine did not start: nothing is lost
            self._write()
            return
        if changed:
            raise EvaluationError(
                f"{self.path} holds an evaluation with other settings: {'; '.join(changed)}. Choose another folder with --out"
            )
        self.record["tasks"] = old.get("tasks", {})

    def samples(self, task: Task) -> dict[tuple[str, int], dict[str, Any]]:
        """Finished samples by (problem, number); a last line that a crash cut off is removed from the file."""
        path = self._samples_path(task)
        if not path.exists():
            return {}
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            path.write_bytes(whole)
        found: dict[tuple[str, int], dict[str, Any]] = {}
        hashes = {prompt.id: prompt_hash(prompt) for prompt in task.prompts}
        kept, damaged = split_lines(path, _is_sample)
        if damaged:
            aside = set_aside(path, damaged)
            write_atomic(path, b"".join(line for line, _ in kept).decode())
            log.warning(
                "%s: damaged samples (%s) were moved to %s and are made again",
                path,
                listed([number for number, _ in damaged]),
                aside.name,
            )
        for _, record in kept:
            key, seen = (record["id"], record["sample"]), record["prompt"]
            if hashes.get(key[0], seen) != seen:
                raise EvaluationError(
                    f"{path}: the problem {key[0]!r} was another one when it was sampled (its text, rendering or answer "
                    "changed); choose another folder with --out"
                )
            found[key] = record
        return found

    def add(self, task: Task, evaluation: Evaluation, done: Mapping[tuple[str, int], Any]) -> None:
        """Append the samples that are not there yet, as one write."""
        lines = []
        for rollout, text, verdict in zip(evaluation.rollouts, evaluation.texts, evaluation.verdicts, strict=True):
            if (rollout.prompt.id, rollout.sample) in done:
                continue
            about = {"id": rollout.prompt.id, "prompt": prompt_hash(rollout.prompt), "sample": rollout.sample}
            about |= {"sandbox": task.sandbox} if task.sandbox else {}
            length = {"tokens": len(rollout), "stop_reason": rollout.stop_reason}
            lines.append(json.dumps({**about, **asdict(verdict), **length, "text": text}) + "\n")
        try:
            with self._samples_path(task).open("a", encoding="utf-8") as file:
                file.write("".join(lines))
        except OSError as error:
            raise EvaluationError(
                f"cannot write to {self.path}: {error.strerror}; finished samples stay, run it again"
            ) from None

    def finish(self, task: Task, samples: int, seconds: float) -> dict[str, Any]:
        """Put a task's results together from its samples and write them."""
        found = self.samples(task)
        rows = [[found[prompt.id, sample] for sample in range(samples)] for prompt in task.prompts]
        every = [record for row in rows for record in row]
        result: dict[str, Any] = {
            "aggregate": task.aggregate,
            "problem_ids": [prompt.id for prompt in task.prompts],
            "scores": [[record["score"] for record in row] for row in rows],
            "outcomes": outcomes(record["status"] for record in every),
            "truncated": sum(record["stop_reason"] == "length" for record in every),
            "mean_tokens": round(sum(record["tokens"] for record in every) / len(every), 1),
            "seconds": round(seconds, 1),
        }
        if used := sorted({str(record["sandbox"]) for record in every if "sandbox" in record}):
            result["sandbox"] = "; ".join(used)
        if any(record["answer"] is not None for record in every):
            result["answers"] = [[record["answer"] for record in row] for row in rows]
        self.record["tasks"][task.name] = result
        self._write()
        return result

    def _samples_path(self, task: Task) -> Path:
        return self.path / f"samples-{re.sub(r'[^A-Za-z0-9+._-]', '_', task.name)}.jsonl"

    def _write(self) -> None:
        write_atomic(self.path / "eval.json", json.dumps(self.record, indent=1) + "\n")


def _is_sample(record: dict[str, Any]) -> bool:
    """Whether a record has what results are made of."""
    words = all(isinstance(record.get(name), str) for name in ("id", "prompt", "text", "status", "stop_reason"))
    counts = all(type(record.get(name)) is int for name in ("sample", "tokens"))
    answered = record.get("answer") is None or isinstance(record["answer"], str)
    return words and counts and answered and number(record.get("score")) is not None


def prompt_hash(prompt: Prompt) -> str:
    """Tells whether a problem is still the same: as the model sees it, and its answer."""
    seen = repr((prompt.token_ids, prompt.answer)).encode(errors="surrogatepass")
    return hashlib.sha256(seen).hexdigest()[:12]
