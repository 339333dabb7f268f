"""Writes the recipes of this folder: one file for every run behind the paper's tables 1-4 and 7 and figures 1a, 2a, 4a and 4c.

    python src/iwopd/recipes/paper/generate.py

Runs that several tables share have one file. Rows with a subscript 10 are the same run at step 10 (`--steps 10`); base rows are
no runs. What the paper leaves open is said in README.md beside this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from iwopd.methods import METHODS, TITLES

FOLDER = Path(__file__).parent
PROMPTS = {"math": 57046, "code": 25276}
"""Prompts of `deepmath` and `eurus-code`, before those over 2048 tokens are left out (docs/data.md)."""
EPOCHS = 3
STUDENTS = ("Qwen3-4B", "Qwen3-1.7B", "Qwen3-0.6B")
LARGE, SMALL, HUGE = "Qwen3-30B-A3B-Instruct-2507", "Qwen3-4B-Instruct-2507", "Qwen3-235B-A22B-Instruct-2507"

ABLATIONS = ("fixed-prefix", "linear-decay", "curriculum", "signed", "ideal", "ideal-blend", "surrogate-only")
ALPHAS = {f"ideal-alpha-{alpha:g}": {"weights": "ideal", "params": {"alpha": alpha}} for alpha in (1.0, 0.1, 0.001)}
"""Of figure 4a; its 0.01 is `ideal` itself."""

COMMON: dict[str, Any] = {
    "seed": 0,
    "precision": "bf16",
    "models": {"dtype": "float32", "teacher_dtype": "bfloat16"},
    "data": {"max_prompt_tokens": 2048},
    "rollout": {"prompts_per_step": 1024, "samples": 1, "max_tokens": 16384, "temperature": 1.0, "top_p": 1.0},
    "optim": {
        "lr": 1e-5,
        "betas": [0.9, 0.999],
        "weight_decay": 0.01,
        "grad_clip": 1.0,
        "ppo_epochs": 1,
        "mini_batches": 1,
        "token_budget": 2048 + 16384,  # one sequence of full length a micro-batch
        "gradient_checkpointing": True,
    },
    "eval": {"every": 10, "prompts": 400, "max_tokens": 16384},
    "checkpoint": {"every": 10},
}
"""The paper's table 6, and what METHOD.md fixes beside it."""

DOMAINS: dict[str, dict[str, Any]] = {
    "math": {
        "data": {"sets": [{"source": "deepmath"}]},
        "eval": {"tasks": ["aime24", "aime25"], "samples": 32, "temperature": 1.0},
    },
    "code": {
        "data": {"sets": [{"source": "eurus-code"}]},
        "eval": {"tasks": ["humaneval+", "mbpp+"], "samples": 1, "temperature": 0.0},
    },
}


@dataclass(frozen=True)
class Row:
    student: str
    teacher: str
    method: str
    domain: str

    @property
    def stem(self) -> str:
        return f"{self.student}-from-{self.teacher}-{self.method}-{self.domain}".lower()


def rows() -> dict[Row, list[str]]:
    """Every run, with the tables and figures that it stands in."""
    found: dict[Row, list[str]] = {}

    def add(where: str, students: tuple[str, ...], teacher: str, methods: tuple[str, ...], domains: tuple[str, ...]) -> None:
        for student in students:
            for method in methods:
                for domain in domains:
                    found.setdefault(Row(student, teacher, method, domain), []).append(where)

    both, math, pair = ("math", "code"), ("math",), ("opd", "iw-opd")
    add("table 1", STUDENTS, LARGE, pair, both)
    add("table 2", STUDENTS, SMALL, pair, both)
    add("table 3", ("Qwen3-30B-A3B",), HUGE, pair, both)
    add("table 4", ("Qwen3-0.6B",), SMALL, (*pair, *ABLATIONS), math)
    add("table 7", ("Qwen3-4B", "Qwen3-1.7B"), LARGE, ("opd", "exopd", "iw-exopd"), both)
    add("figure 1a", ("Qwen3-0.6B",), SMALL, ("opd", "prefix-30", "suffix-30"), math)
    add("figure 2a", ("Qwen3-1.7B",), SMALL, pair, math)
    add("figure 4a", ("Qwen3-0.6B",), SMALL, ("ideal", *ALPHAS), math)
    add("figure 4c", ("Qwen3-0.6B",), SMALL, ("signed", "iw-opd"), math)
    return found


def settings(row: Row) -> dict[str, Any]:
    """The recipe of a row as a tree."""
    tree = {name: dict(value) if isinstance(value, dict) else value for name, value in COMMON.items()}
    tree = {"seed": tree.pop("seed"), "steps": EPOCHS * (PROMPTS[row.domain] // 1024), **tree}
    tree["models"] = {"student": f"Qwen/{row.student}", "teacher": f"Qwen/{row.teacher}", **tree["models"]}
    for section, values in DOMAINS[row.domain].items():
        tree[section] |= values
    return {**tree, "method": METHODS.get(row.method) or ALPHAS.get(row.method, {})}


def text(row: Row, where: list[str]) -> str:
    """A recipe as the file has it."""
    alpha = row.method.removeprefix("ideal-alpha-")
    title = TITLES.get(row.method) or f"{TITLES['ideal']}, alpha {alpha}"
    head = f"# {title}: {row.student} from {row.teacher}, {row.domain} ({', '.join(where)} of the paper)\n"
    return head + "# Written by generate.py: change it there.\n" + tomli_w.dumps(settings(row))


def main() -> None:
    for old in FOLDER.glob("*.toml"):
        old.unlink()
    for row, where in rows().items():
        (FOLDER / f"{row.stem}.toml").write_text(text(row, where), encoding="utf-8")
    print(f"{len(rows())} recipes in {FOLDER}")


if __name__ == "__main__":
    main()
