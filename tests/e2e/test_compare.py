"""`iwopd compare` as a process: output, files, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from iwopd.config import config_toml, make_config
from iwopd.methods import METHODS
from waiting import PATIENCE

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, two seeds each, two evaluations each, sampled with the same noise, as `iwopd train` leaves them."""
    folder = tmp_path_factory.mktemp("runs")
    for method, gain in (("opd", 0.0), ("iw-opd", 0.12)):
        for seed in range(2):
            path = folder / f"{method}-seed{seed}"
            path.mkdir()
            tree = {"seed": seed, "models": {"world": "drift"}, "method": METHODS[method]}
            (path / "config.toml").write_text(config_toml(make_config(tree)))
            (path / "run.json").write_text(json.dumps({"format": 1, "iwopd": "0.1.0", "data": "x"}))
            lines = []
            for step in (0, 40):
                noise = torch.rand(60, 4, generator=torch.Generator().manual_seed(seed))
                chance = torch.linspace(0.1, 0.7, 60)[:, None] + (gain + 0.1 if step else 0.0)
                scores = (noise < chance).int().tolist()
                ids = [f"tiny/{row}" for row in range(60)]
                lines.append(json.dumps({"step": step, "task": "tiny", "problem_ids": ids, "scores": scores, "seconds": 1.0}))
            (path / "evals.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def compare(*words: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "iwopd", "compare", *(str(word) for word in words)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_a_table_for_people(runs: Path) -> None:
    text = compare(runs / "opd-seed0", runs / "iw-opd-seed0").stdout
    assert "IW-OPD − OPD on tiny: +" in text.replace("\n", " ")
    assert "distinguishable from noise" in text
    assert "Note: One training seed a side" in text


def test_seeds_steps_and_a_file(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    words = [runs / "opd-seed0@0", *(runs / f"{method}-seed{seed}" for method in ("opd", "iw-opd") for seed in range(2))]
    done = compare(*words, "--baseline", "OPD", "--format", "json", "-o", out)
    assert done.stdout == ""
    content = json.loads(out.read_text())
    assert [group["name"] for group in content["groups"]] == ["Base", "OPD", "IW-OPD"]
    assert [len(group["runs"]) for group in content["groups"]] == [1, 2, 2]
    gain = next(d for d in content["differences"] if d["group"] == "IW-OPD")
    assert gain["mean"] == pytest.approx(12, abs=4)
    assert gain["seeds"] == 2
    assert gain["noise_cancelled"] > 0.5


def test_tables_for_papers(runs: Path, tmp_path: Path) -> None:
    words = (f"A={runs / 'opd-seed0'}", f"B={runs / 'iw-opd-seed0'}")
    assert r"\begin{tabular}{ll|c}" in compare(*words, "--format", "latex").stdout
    assert "| drift world | B |" in compare(*words, "--format", "markdown").stdout
    compare(*words, "-o", tmp_path / "table.txt")
    assert "B − A" in (tmp_path / "table.txt").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere", "elsewhere"), "nowhere does not exist"),
        (("{runs}/opd-seed0",), "all results belong to one group (OPD)"),
        (("{runs}/opd-seed0", "{runs}/iw-opd-seed0", "--step", "7"), "was not evaluated at step 7"),
        (("{runs}/opd-seed0", "{runs}/iw-opd-seed0", "--metric", "best@99"), "k = 99 is not possible with 4 samples"),
        (("{runs}/opd-seed0", "{runs}/iw-opd-seed0", "--level", "95"), "level 95.0 is not a confidence level"),
        (("{runs}/opd-seed0", "{runs}/iw-opd-seed0", "--tasks", ","), "--tasks is empty"),
        (("{runs}/opd-seed0", "{runs}/iw-opd-seed0", "-o", "{runs}"), "cannot write"),
    ],
)
def test_one_line_for_every_mistake(runs: Path, words: tuple[str, ...], message: str) -> None:
    done = compare(*(word.format(runs=runs) for word in words), code=2)
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
