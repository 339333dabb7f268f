"""The paper's recipes: one for every row, as the generator writes them, with the numbers of METHOD.md's training set-up."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from iwopd.algo.objectives import make_objective
from iwopd.config import Config, differences, load_config
from iwopd.data.sets import NAMED
from iwopd.eval.catalog import find_task
from iwopd.methods import METHODS
from waiting import PATIENCE

FOLDER = Path(__file__).parents[2] / "src" / "iwopd" / "recipes" / "paper"
FILES = sorted(FOLDER.glob("*.toml"))
FOUR, THIRTY, LARGEST = "qwen3-4b-instruct-2507", "qwen3-30b-a3b-instruct-2507", "qwen3-235b-a22b-instruct-2507"

# Written down from the paper's tables, not from the generator.
ABLATIONS = (
    *("opd", "fixed-prefix", "linear-decay", "curriculum", "iw-opd", "signed"),
    *("ideal", "ideal-blend", "surrogate-only"),
)
ROWS: list[tuple[str, str, str, str]] = [
    *((s, THIRTY, m, d) for s in ("4b", "1.7b", "0.6b") for m in ("opd", "iw-opd") for d in ("math", "code")),  # table 1
    *((s, FOUR, m, d) for s in ("4b", "1.7b", "0.6b") for m in ("opd", "iw-opd") for d in ("math", "code")),  # table 2
    *(("30b-a3b", LARGEST, m, d) for m in ("opd", "iw-opd") for d in ("math", "code")),  # table 3
    *(
        ("0.6b", FOUR, m, "math")  # table 4, figures 1a, 4a, 4c
        for m in (*ABLATIONS, "prefix-30", "suffix-30", "ideal-alpha-1", "ideal-alpha-0.1", "ideal-alpha-0.001")
    ),
    *((s, THIRTY, m, d) for s in ("4b", "1.7b") for m in ("opd", "exopd", "iw-exopd") for d in ("math", "code")),  # table 7
    *(("1.7b", FOUR, m, "math") for m in ("opd", "iw-opd")),  # figure 2a
]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("paper_recipes", FOLDER / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["paper_recipes"] = module
    spec.loader.exec_module(module)
    return module


def method_of(path: Path) -> str:
    return path.stem.partition("-from-")[2].rpartition("-")[0].partition("-2507-")[2]


def test_every_row_has_its_file_and_every_file_its_row() -> None:
    assert {path.stem for path in FILES} == {f"qwen3-{s}-from-{t}-{m}-{d}" for s, t, m, d in ROWS}
    assert len(FILES) == 48


def test_the_files_are_what_the_generator_writes(generator: ModuleType) -> None:
    written = {f"{row.stem}.toml": generator.text(row, where) for row, where in generator.rows().items()}
    assert written == {path.name: path.read_text(encoding="utf-8") for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_holds_the_papers_numbers(path: Path) -> None:
    """METHOD.md, "The paper's training set-up". What else can be asked of a recipe without a model belongs here, too."""
    config = load_config(path)
    optim, rollout = config.optim, config.rollout
    assert (optim.lr, optim.betas, optim.weight_decay, optim.grad_clip) == (1e-5, (0.9, 0.999), 0.01, 1.0)
    assert (rollout.prompts_per_step, rollout.samples, optim.ppo_epochs, optim.mini_batches) == (1024, 1, 1, 1)
    assert (config.data.max_prompt_tokens, rollout.max_tokens) == (2048, 16384)
    assert (rollout.temperature, rollout.top_p, rollout.top_k, rollout.truncated) == (1.0, 1.0, 0, "keep")
    method = config.method.model_dump()
    assert (method["clip"], method["dual_clip"], method["correction_threshold"]) == (0.2, 3.0, 5.0)
    assert (method["entropy_coef"], method["kl_coef"]) == (0.0, 0.0)
    assert (config.eval.every, config.checkpoint.every) == (10, 10)
    is_math = path.stem.endswith("-math")
    (data,) = config.data.sets
    assert data.source == ("deepmath" if is_math else "eurus-code")
    # Three epochs of about 57K and 25K prompts.
    assert config.steps == (3 * (57_046 // 1024) if is_math else 3 * (25_276 // 1024))
    assert (config.eval.samples, config.eval.temperature) == ((32, 1.0) if is_math else (1, 0.0))
    assert config.eval.tasks == (["aime24", "aime25"] if is_math else ["humaneval+", "mbpp+"])
    for task in config.eval.tasks:
        assert find_task(task).name == task
    assert data.source in NAMED
    student, _, rest = path.stem.partition("-from-")
    assert str(config.models.student).lower() == f"qwen/{student}"
    assert rest.startswith(str(config.models.teacher).lower().removeprefix("qwen/"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_names_its_method(path: Path) -> None:
    config = load_config(path)
    name = method_of(path)
    alpha = name.removeprefix("ideal-alpha-")
    wanted: dict[str, Any] = METHODS[name] if alpha == name else {"weights": "ideal", "params": {"alpha": float(alpha)}}
    given = tomllib.loads(path.read_text()).get("method", {})
    assert given == wanted
    assert config.method.made == make_objective(wanted)
    if name == "iw-opd":
        assert given == {"weights": "cumulative-share", "params": {"gamma": 0.5}}


def test_recipes_differ_only_in_what_their_rows_differ_in() -> None:
    configs = {path.stem: load_config(path) for path in FILES}
    base = configs[f"qwen3-0.6b-from-{FOUR}-opd-math"]

    def changed(config: Config) -> set[str]:
        return set(differences(base, config))

    for stem, config in configs.items():
        allowed = {"models.student", "models.teacher"} if not stem.startswith(f"qwen3-0.6b-from-{FOUR}") else set()
        if stem.endswith("-code"):
            allowed |= {"steps", "data.sets", "eval.tasks", "eval.samples", "eval.temperature"}
        if method_of(FOLDER / stem) != "opd":
            allowed |= {f"method.{name}" for name in ("advantage", "scale", "weighting", "weights", "params")}
        assert changed(config) <= allowed, stem


def test_the_doctor_finds_nothing_wrong_without_models(tmp_path: Path) -> None:
    """Its static part over every recipe; the hub is out of reach, which it must say, and nothing else may fail."""
    code = """
import sys
from pathlib import Path
from iwopd.config import load_config
from iwopd.train.doctor import examine_recipe
for path in sys.argv[2:]:
    found = list(examine_recipe(load_config(Path(path)), Path(sys.argv[1]), static=True))
    assert found
    for finding in found:
        if finding.level == "fail":
            print(Path(path).stem, finding.text())
"""
    words = [sys.executable, "-c", code, str(tmp_path / "run"), *(str(path) for path in FILES)]
    done = subprocess.run(words, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
