"""What a horizon costs: lengths by hand, times against those of full rollouts, and what is unknown without a probe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from iwopd import recipes
from iwopd.analysis.probe.result import Horizons, Probe, Rollouts, write_probe
from iwopd.cli import main
from iwopd.cluster.plan import GPUS, CutLengths, PlanError, as_dict, make_plan, open_workload, report
from iwopd.cluster.plan.estimate import mean_time, step_time
from iwopd.cluster.plan.horizon import TRAINING, priced, to_the_end
from iwopd.cluster.plan.layout import local_layout
from iwopd.cluster.plan.rates import TYPICAL
from iwopd.cluster.plan.rollouts import measured_lengths
from iwopd.cluster.plan.workload import Workload
from iwopd.config import load_config

RECIPE = recipes.find("paper/qwen3-0.6b-from-qwen3-4b-instruct-2507-iw-opd-math")
H200 = GPUS["h200"]
FULL = tuple(100.0 * place for place in range(21))
"""Lengths from 0 to 2,000, all alike often."""
DRIFT = {"type": "drift", "threshold": 0.05, "block": 8}
HALF = CutLengths(DRIFT, tuple(length / 2 for length in FULL))
OTHER = CutLengths({**DRIFT, "threshold": 0.5}, tuple(length / 4 for length in FULL))


def workload(quantiles: tuple[float, ...] = (), mean: float | None = None, **horizon: Any) -> Workload:
    settings = {f"rollout.horizon.{name.rstrip('_')}": value for name, value in horizon.items()}
    return open_workload(load_config(RECIPE, settings), mean, quantiles)


def test_lengths_between_quantiles() -> None:
    assert sorted(measured_lengths(4, (0.0, 10.0, 30.0))) == [2, 8, 15, 25]
    assert sorted(measured_lengths(2, (8.0, 8.0))) == [8, 8]
    assert max(measured_lengths(2, (0.0, 1000.0), everyone=100)) == 995
    assert min(measured_lengths(3, (0.0, 0.0, 0.0))) == 1  # an answer has a token
    assert sum(measured_lengths(200, FULL)) / 200 == pytest.approx(1000, rel=0.01)


def test_full_rollouts_cost_what_they_did() -> None:
    work = workload()
    found = priced(work)
    assert (found.by, found.steps) == ("full", (work,))
    assert work.written == work.answer
    plan = make_plan(work, H200, 1, 1)
    assert plan.typical == plan.full
    assert "full rollouts" not in report(plan)


def test_a_fixed_limit() -> None:
    work = workload(FULL, type="fixed", tokens=500)
    found = priced(work)
    assert found.by == "limit"
    lengths = found.middle.lengths(1000)
    assert max(lengths) == 500
    assert sum(lengths) / 1000 == pytest.approx(500 - 500 * 500 / 2 / 2000, rel=0.01)  # a quarter of them is shorter
    plan = make_plan(work, H200, 1, 1)
    assert plan.typical.total < plan.full.total
    assert plan.typical.rollout < plan.full.rollout
    assert "answers of at most 500 tokens" in report(plan)
    assert priced(workload(type="fixed", tokens=16384)).by == "full"


def test_a_growing_limit_is_priced_over_training() -> None:
    work = workload(mean=3000.0, type="growing", from_=1024)
    found = priced(work)
    limits = [1024 + round(progress * (16384 - 1024)) for progress in TRAINING]
    assert [step.limit for step in found.steps] == pytest.approx(limits, abs=1)
    layout = local_layout(work, H200)
    times = [step_time(step, layout, TYPICAL) for step in found.steps]
    assert [time.total for time in times] == sorted(time.total for time in times)
    plan = make_plan(work, H200, 1, 1)
    assert plan.typical.total == pytest.approx(sum(time.total for time in times) / len(times))
    assert mean_time(times).update == pytest.approx(sum(time.update for time in times) / len(times))
    assert "at most 1024 tokens at first, 16384 at the end" in report(plan)


def test_drift_without_a_probe_is_priced_as_full() -> None:
    plan = make_plan(workload(type="drift"), H200, 1, 1)
    assert plan.horizon.by == "unknown"
    assert "unknown without the pair's answers: priced as full; give a probe of the pair with --probe" in report(plan)
    assert as_dict(plan)["horizon"]["priced"] == "unknown"
    strange = make_plan(workload(FULL, type="drift", block=32), H200, 1, 1, [HALF])
    assert "the probe has no such horizon" in strange.horizon.words


def test_drift_with_a_probe() -> None:
    work = workload(FULL, type="drift", threshold=0.05)
    assert work.written == pytest.approx(1000, rel=0.01)
    plan = make_plan(work, H200, 1, 1, [OTHER, HALF])
    assert plan.horizon.by == "probe"
    assert plan.work.written == pytest.approx(500, rel=0.01)
    assert plan.full == make_plan(workload(FULL), H200, 1, 1).typical
    # Half of the tokens that are scored, and 756 of 1,256 that are read: prompts have 256.
    assert 0.5 < plan.typical.update / plan.full.update < 0.6
    found = as_dict(plan)
    assert found["horizon"]["full"]["mean_response_tokens"] == pytest.approx(1000, rel=0.01)
    assert found["horizon"]["share_of_full_seconds"] == plan.typical.total / plan.full.total
    assert found["step"]["mean_response_tokens"] == plan.work.written
    near = priced(workload(FULL, type="drift", threshold=0.04), [OTHER, HALF])
    assert (near.middle.quantiles, "at threshold 0.05" in near.words) == (HALF.quantiles, True)


def test_a_budget_buys_prompts() -> None:
    plan = make_plan(workload(FULL, type="budget", threshold=0.05, tokens=1024 * 1000), H200, 1, 1, [HALF])
    assert plan.work.rollouts == pytest.approx(2048, rel=0.01)
    assert to_the_end(plan.work).rollouts == 1024
    assert "tokens pay for 20" in plan.horizon.words


def test_a_teacher_that_follows_has_a_cache_and_reads_its_weights_at_every_look() -> None:
    work, plain = workload(FULL, type="drift"), workload(FULL)
    layout, without = local_layout(work, H200), local_layout(plain, H200)
    row = 2 * (2 * 36 * 8 * 128) * 2 * work.longest  # Qwen3-4B: 36 layers, 8 key heads of 128; bfloat16; half of it empty
    assert work.on_one_device().stages["rollouts"]["teacher's cache"] == row
    assert "teacher's cache" not in plain.on_one_device().stages["rollouts"]
    assert layout.cache_tokens < without.cache_tokens
    assert step_time(work, layout, TYPICAL).teacher >= step_time(plain, without, TYPICAL).teacher
    few = workload((64.0, 64.0), type="drift", block=1)
    assert step_time(few, local_layout(few, H200), TYPICAL).teacher > 64 * 36 * TYPICAL.launch_seconds


def test_on_verl_nobody_follows() -> None:
    with pytest.raises(PlanError, match="no teacher follows answers"):
        make_plan(workload(type="drift"), H200, 1, 8)
    assert make_plan(workload(type="fixed", tokens=512), H200, 1, 8).horizon.by == "limit"


def probe_file(path: Path, part: Horizons | None) -> Path:
    about = Rollouts(prompts=2, rollouts=2, empty=0, truncated=0, mean_tokens=1000.0)
    write_probe(Probe(iwopd="0", student="s", teacher="t", settings={}, rollouts=about, horizons=part), path)
    return path


def test_the_command_reads_a_probe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def plan(*words: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            main(["plan", str(RECIPE), "--gpu", "h200", "--gpus-per-node", "1", *map(str, words)])
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out + said.err

    def row(section: dict[str, Any], lengths: tuple[float, ...]) -> dict[str, Any]:
        one = {"mean": 0.5}
        return {"key": "x", "title": "x", "section": section, "written": one, "stopped": one, "prompts": 2, "methods": []} | {
            "lengths": lengths
        }

    rows = [row({"type": "full"}, FULL), row(DRIFT, HALF.quantiles)]
    levels = [place / 20 for place in range(21)]
    part = Horizons.model_validate(
        {"batches": 2, "batch_prompts": 1, "mean_tokens": 1000.0, "levels": levels, "horizons": rows}
    )
    whole, bare = probe_file(tmp_path / "whole" / "probe.json", part), probe_file(tmp_path / "bare.json", None)
    code, said = plan("--probe", whole.parent, "--rollout.horizon.type", "drift", "--rollout.horizon.threshold", 0.05, "--json")
    assert code == 0, said
    found = json.loads(said)
    assert found["horizon"]["priced"] == "probe"
    assert found["step"]["mean_response_tokens"] == pytest.approx(500, rel=0.01)
    assert "run `iwopd probe` again" in plan("--probe", bare)[1]
    assert "leave one of them out" in plan("--probe", whole, "--response-tokens", 100)[1]
    assert "cannot read the probe" in plan("--probe", tmp_path / "nothing.json")[1]
