"""Alerts: each kind is raised by what it is about, tells since when with numbers, and is silent about sound runs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from iwopd.runs.alerts import CHECKS, WINDOW, AlertWatch, find_alerts


def steps(count: int, **changes: Any) -> list[dict[str, Any]]:
    """Records of a sound run; `changes` has a function of the step for a metric (`/` as two underscores)."""
    sound = {
        "rollouts": 64,
        "skipped": False,
        "update/skipped": 0,
        "rollout/length_mean": 100.0,
        "rollout/length_max": 120,
        "rollout/truncated": 0.0,
        "rollout/stopped": 0.0,
        "rollout/entropy_sampled": 0.3,
        "gap/abs_mean": 0.5,
        "gap/noise_floor": 1e-6,
    }
    made = {name.replace("__", "/"): make for name, make in changes.items()}
    return [{"step": step, **sound, **{name: make(step) for name, make in made.items()}} for step in range(1, count + 1)]


def only(records: list[dict[str, Any]], kind: str) -> Any:
    found = find_alerts(records)
    assert [alert.kind for alert in found] == [kind]
    return found[0]


def test_a_sound_run_has_no_alert() -> None:
    learning = steps(
        60,
        rollout__entropy_sampled=lambda step: 0.3 / step,
        gap__abs_mean=lambda step: 0.5 / step,
        gap__noise_floor=lambda _: 0.0,
    )
    assert find_alerts(learning) == ()  # certain, and near the teacher
    assert find_alerts([]) == ()


def test_length_inflation() -> None:
    alert = only(steps(40, rollout__length_mean=lambda step: 100 + 10 * max(0, step - 10)), "length")
    assert 15 < alert.since < 22
    assert alert.active
    assert alert.last == 40
    assert "from 100 to 380 tokens (3.8 times)" in alert.text  # the worst, not the first
    assert "Length inflation since step" in alert.sentence
    assert "optim.lr" in alert.sentence


def test_lengths_that_only_vary_are_no_inflation() -> None:
    assert find_alerts(steps(60, rollout__length_mean=lambda step: 100 + 90 * math.sin(step))) == ()


def test_lengths_under_a_horizon_are_the_horizons() -> None:
    longer = {"rollout__length_mean": lambda step: 20.0 * step}
    assert find_alerts(steps(40, rollout__stopped=lambda _: 0.3, **longer)) == ()
    assert find_alerts(steps(40, **longer))


def test_truncation() -> None:
    alert = only(
        steps(20, rollout__truncated=lambda step: 0.25 if step > 10 else 0.0, rollout__length_max=lambda _: 8192), "truncation"
    )
    assert alert.since == 12  # two of five steps: 10 %
    assert "25% of the answers reached the limit of 8,192 tokens" in alert.text
    assert "rollout.max_tokens" in alert.remedy


def test_one_cut_answer_of_few_is_chance() -> None:
    few = {"rollouts": lambda _: 1}
    assert find_alerts(steps(20, rollout__truncated=lambda step: float(step == 7), **few)) == ()
    assert find_alerts(steps(20, rollout__truncated=lambda step: float(step > 7), **few))


def test_entropy_collapse_is_certainty_far_from_the_teacher() -> None:
    fall = {"rollout__entropy_sampled": lambda step: 0.3 if step <= 10 else 0.01}
    alert = only(steps(30, **fall), "entropy")
    assert "from 0.3 to 0.01 nats" in alert.text
    assert "from 0.5 to 0.5" in alert.text
    near = {"gap__abs_mean": lambda step: 0.5 if step <= 10 else 0.02}
    assert find_alerts(steps(30, **fall, **near)) == ()  # that is learning
    assert find_alerts(steps(30, **fall, teacher__entropy=lambda _: 0.011)) == ()  # the teacher is as certain
    loops = {"rollout__length_mean": lambda step: 100.0 if step <= 10 else 300.0}
    assert {alert.kind for alert in find_alerts(steps(30, **fall, **near, **loops))} == {"length", "entropy"}


def test_noise_floor() -> None:
    alert = only(steps(30, gap__abs_mean=lambda step: 0.5 / step, gap__noise_floor=lambda _: 0.004), "noise")
    assert "is the pipeline's own noise (0.004)" in alert.text
    assert 12 < alert.since < 18
    itself = {"gap__abs_mean": lambda _: 0.0, "gap__noise_floor": lambda _: 0.004}
    assert find_alerts(steps(5, **itself)) == ()  # its own teacher before it has moved


def test_skipped_updates_are_counted_and_end() -> None:
    records = steps(20, update__skipped=lambda step: int(step in (4, 5, 17)), skipped=lambda step: step in (4, 5, 17))
    first, second = find_alerts(records)
    assert (first.since, first.last, first.active) == (4, 5, False)
    assert first.text.startswith("2 updates in 5 steps left out")
    assert (second.since, second.last, second.active) == (17, 17, True)
    begun = find_alerts(records[:4])[0]
    assert begun.text.startswith("1 update in 4 steps left out")


def test_step_by_step_is_the_same_as_afterwards() -> None:
    records = steps(
        30, rollout__truncated=lambda step: 0.3 if 5 < step < 15 else 0.0, update__skipped=lambda step: int(step == 20)
    )
    watch = AlertWatch()
    begun = {(alert.kind, alert.since) for record in records for alert in watch.step(record)}
    assert begun == {(alert.kind, alert.since) for alert in find_alerts(records)}
    resumed = AlertWatch(records[:10])
    for record in records[10:]:
        resumed.step(record)
    assert resumed.alerts == watch.alerts == find_alerts(records)


def test_flags_for_trackers() -> None:
    watch = AlertWatch(steps(WINDOW))
    assert watch.flags() == {f"alert/{kind}": 0.0 for kind in CHECKS}
    watch.step({**steps(1)[0], "step": WINDOW + 1, "skipped": True, "update/skipped": 1})
    assert watch.flags()["alert/skipped"] == 1.0
    assert sum(watch.flags().values()) == 1
    assert [alert.kind for alert in watch.active] == ["skipped"]


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "x", [], 10**400])
def test_records_of_any_kind_do_no_harm(value: Any) -> None:
    names = list(steps(1)[0])[1:]
    for name in names:
        find_alerts([{**record, name: value} for record in steps(12)])
    find_alerts([{"step": step, **dict.fromkeys(names, value)} for step in range(12)])
    find_alerts([{"step": step} for step in range(12)])


def test_steps_without_rollouts_are_passed_over() -> None:
    given = [{"step": step, "rollouts": 0, "skipped": False, "rollout/length_mean": math.nan} for step in range(1, 8)]
    later = steps(40, rollout__length_mean=lambda step: 100 if step < 20 else 200.0)[8:]
    assert only(given + later, "length").since > 20
