"""Run directories as a training run would leave them, made up, for the tests of the report."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import tomli_w

METHODS: dict[str, dict[str, Any]] = {
    "opd": {"weights": "uniform", "params": {}},
    "iw-opd": {"weights": "cumulative-share", "params": {"gamma": 0.5}},
}


def make_run(
    folder: Path,
    method: str = "opd",
    *,
    seed: int = 0,
    steps: int = 20,
    planned: int | None = None,
    task: str = "tiny",
    problems: int = 40,
    rollouts: int = 6,
    length: int = 30,
    skill: float = 0.03,
) -> Path:
    """A run of `steps` steps with evaluations every ten and rollouts kept at each."""
    rng = random.Random(f"{method} {seed}")
    folder.mkdir(parents=True)
    write(folder / "run.json", {"format": 1, "iwopd": "0.1.0", "data": "0123456789abcdef"})
    config = {"seed": seed, "steps": planned or steps, "method": METHODS[method], "models": {"world": "drift", "lineage": 0}}
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    lines(folder / "metrics.jsonl", [metrics(step, rng) for step in range(1, steps + 1)])
    evaluated = range(0, steps + 1, 10)
    lines(folder / "evals.jsonl", [evaluation(step, rng, task, problems, 0.3 + skill * step) for step in evaluated])
    lines(folder / "rollouts.jsonl", [rollout(step, n, rng, length) for step in evaluated for n in range(rollouts)])
    return folder


def metrics(step: int, rng: random.Random) -> dict[str, Any]:
    decay = math.exp(-step / 10)
    gap = [(2.0 * decay + 0.2) * (1 - place / 10) for place in range(10)]
    return {
        "step": step,
        "loss": decay + 0.1 * rng.random(),
        "grad_norm": 1 + rng.random(),
        "tokens": 4096,
        "rollouts": 64,
        "skipped": False,
        "time/rollout": 0.2,
        "time/teacher": 0.1,
        "time/signal": 0.001,
        "time/update": 0.3,
        "time/step": 0.6,
        "throughput/tokens_per_second": 6000 + 100 * rng.random(),
        "kl/sampled": decay,
        "gap/abs_mean": decay + 0.05,
        "weights/mean": 1.2,
        "rollout/length_mean": 64 + rng.random(),
        "rollout/truncated": 0.01 * rng.random(),
        "rollout/entropy_sampled": 0.03,
        "teacher/floored": 0,
        "update/count": 1,
        "update/skipped": 0,
        "gradient/agreement": 0.2 * rng.random(),
        "policy/clip_fraction": 0.0,
        "policy/approx_kl": 0.0,
        "position/abs_gap": gap,
        "position/kl": [value - 0.05 for value in gap],
        "position/weights": [1.5 - place / 20 for place in range(10)],
    }


def evaluation(step: int, rng: random.Random, task: str, problems: int, chance: float) -> dict[str, Any]:
    scores = [[float(rng.random() < chance)] for _ in range(problems)]
    mean = sum(row[0] for row in scores) / problems
    ids = [f"{task}/{place}" for place in range(problems)]
    about = {"step": step, "task": task, "mean": mean, "problems": problems, "samples": 1, "seconds": 0.5}
    return {**about, "problem_ids": ids, "scores": scores}


def rollout(step: int, place: int, rng: random.Random, length: int) -> dict[str, Any]:
    """One with everything that a record has; drift begins at another token in every one."""
    student = [-rng.expovariate(2) for _ in range(length)]
    teacher = [value - (5 * rng.random() if t % 7 == place else 0.4 * rng.random()) for t, value in enumerate(student)]
    tokens = [rng.choice([" the", "=", "4", "\n", "*", "}"]) for _ in range(length)]
    return {
        "step": step,
        "prompt_id": f"eval/{place}",
        "prompt": f"{place}+1?",
        "answer": str(place + 1),
        "text": "".join(tokens),
        "correct": place % 2 == 0,
        "stop_reason": {3: "length", 2: "horizon"}.get(place, "eos"),
        "token_ids": [100 + hash_of(token) for token in tokens],
        "tokens": tokens,
        "student_logprobs": [round(value, 6) for value in student],
        "teacher_logprobs": [round(value, 6) for value in teacher],
        "gap": [round(b - a, 6) for a, b in zip(student, teacher, strict=True)],
        "weights": [round(1.5 - 0.5 * t / length, 6) for t in range(length)],
        "kl": [round(rng.expovariate(3), 6) for _ in range(length)],
    }


def handoff(folder: Path) -> Path:
    points = {f"{tenth / 10:g}": {"mean": 90 - 6 * tenth, "low": 85 - 6 * tenth, "high": 95 - 6 * tenth} for tenth in range(10)}
    student = {"mean": 30.0, "low": 25.0, "high": 35.0}
    return write(
        folder / "handoff.json", {"format": 1, "world": "drift", "problems": 40, "fractions": points, "student": student}
    )


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def hash_of(token: str) -> int:
    """The same in every process, unlike `hash`."""
    return sum(map(ord, token)) % 50


def make_probe(path: Path, student: str = "small", **changes: Any) -> Path:
    """A `probe.json` with all parts, of ten bins, made up; `changes` replace fields."""
    bins = 10
    edges = [place / bins for place in range(bins + 1)]

    def estimate(mean: float, half: float = 0.05) -> dict[str, float]:
        return {"mean": mean, "low": mean - half, "high": mean + half}

    def curve(means: list[float], half: float = 0.05) -> dict[str, list[float]]:
        return {"mean": means, "low": [mean - half for mean in means], "high": [mean + half for mean in means]}

    falling = [2.0 - place / bins for place in range(bins)]
    rising = [5.0 * (place + 1) for place in range(bins)]
    fractions = [0.0, 0.3, 0.9]
    prefixes = {
        "edges": edges,
        "rollouts": [40] * bins,
        "student": curve([-value / 10 for value in rising]),
        "teacher": curve([-value for value in rising]),
        "difference": curve([-0.9 * value for value in rising]),
    }
    rules = [
        ("opd", "OPD", "uniform"),
        ("iw-opd-0.5", "IW-OPD, gamma 0.5", "cumulative-share"),
        ("surrogate-only", "Surrogate weight only", "cumulative-share"),
        *((f"ideal-{alpha}", f"Ideal weight, alpha {alpha}", "ideal") for alpha in ("1", "0.1", "0.01", "0.001")),
        ("prefix-30", "Prefix-30", "prefix-only"),
        ("mine", "Of a plug-in", "mine"),
    ]
    aligned = [
        {"key": key, "title": title, "cosine": estimate(0.3 + place / 100), "gain": estimate(place / 10) if place else None}
        for place, (key, title, _) in enumerate(rules)
    ]
    regions = [
        {"key": key, "title": f"OPD {key} the drift", "cosine": estimate(0.2), "gain": estimate(0.0), "share": estimate(share)}
        for key, share in (("before", 0.1), ("at", 0.2), ("until", 0.3), ("after", 0.7))
    ]
    verdicts = [
        {"key": key, "title": title, "right": estimate(0.1), "wrong": estimate(0.4), "difference": estimate(0.3)}
        for key, title, _ in rules[:2]
    ]
    values = {
        "format": 1,
        "iwopd": "0.1.0",
        "student": student,
        "teacher": "large",
        "task": "tiny",
        "settings": {"bins": bins},
        "rollouts": {"prompts": 40, "rollouts": 40, "empty": 0, "truncated": 2, "mean_tokens": 30.0},
        "missing": {},
        "notes": ["a remark of the probe"],
        "handoff": {
            "fractions": fractions,
            "teacher": curve([0.9, 0.6, 0.4]),
            "student": estimate(0.35),
            "fall": estimate(0.5),
            "problems": 40,
            "continuations": 4,
        },
        "positions": {
            "edges": edges,
            "tokens": [120] * bins,
            **{name: curve(falling) for name in ("abs_gap", "gap", "kl")},
            **{name: curve([value / sum(falling) for value in falling], 0.01) for name in ("share", "kl_share")},
            **{name: estimate(0.4) for name in ("mean_abs_gap", "mean_kl", "half", "first_30")},
        },
        "drift": {
            "threshold": 2.0,
            **{name: estimate(0.3) for name in ("rollouts", "position", "before", "at", "until", "after")},
        },
        "overlap": {
            "k": 5,
            "chance": 0.1,
            "edges": edges,
            "shared": curve([0.5] * bins),
            "same_first": curve([0.8] * bins),
            "mean_shared": estimate(0.5),
            "mean_same_first": estimate(0.8),
        },
        "likelihood": {
            "by_fraction": prefixes,
            "by_token": {**prefixes, "edges": [3.0 * edge for edge in range(bins + 1)]},
            **{name: estimate(-30.0) for name in ("student", "teacher", "difference")},
        },
        "rules": {
            "edges": edges,
            "rules": [
                {
                    "key": key,
                    "title": title,
                    "rule": rule,
                    "params": {},
                    "weights": curve(falling),
                    "effective": estimate(0.9),
                    "first_30": estimate(0.4),
                }
                for key, title, rule in rules
            ],
            "cumulative": {
                "signed": curve([-value for value in rising]),
                "unsigned": curve([1.1 * value for value in rising]),
                "rebound": estimate(0.5),
                "opposite": estimate(0.02, 0.01),
            },
        },
        "horizons": {
            "batches": 8,
            "batch_prompts": 4,
            "mean_tokens": 30.0,
            "levels": [place / 20 for place in range(21)],
            "horizons": [
                {
                    "key": key,
                    "title": key.replace("-", " "),
                    "section": {"type": key.partition("-")[0]},
                    "written": estimate(written, 0.02),
                    "stopped": estimate(1.0 - written),
                    "prompts": 1 / written,
                    "lengths": [30.0 * written] * 21,
                    "methods": [
                        {
                            "key": method,
                            "title": title,
                            "kept": estimate(kept, 0.0 if key == "full" else 0.04),
                            "in_batch": estimate(kept),
                            "noise": 2.0,
                            "noise_at_equal_tokens": 2.0 * written**0.5,
                        }
                        for method, title, kept in (("opd", "OPD", written), ("survival", "Survival", written**0.1))
                    ],
                }
                for key, written in (
                    ("full", 1.0),
                    ("fixed-8", 0.25),
                    ("fixed-15", 0.5),
                    ("drift-0.5", 0.3),
                    ("drift-0.1", 0.4),
                )
            ],
            "proposal": {
                "method": "survival",
                "section": {"type": "drift", "threshold": 0.1, "block": 8},
                "written": 0.4,
                "words": "Horizon for Survival: drift 0.1.",
            },
        },
        "alignment": {
            "batches": 4,
            "batch_prompts": 10,
            "rules": aligned,
            "regions": regions,
            "verdicts": verdicts,
            "compared": 12,
        },
        "agreement": {"batches": 8, "batch_prompts": 4, "cosine": estimate(-0.25, 0.05), "gate": 0.0},
        "bias": "strong",
        "verdict": ["The position bias is strong.", "It falls."],
        "seconds": {"rollouts": 1.5},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    return write(path, {**values, **changes})
