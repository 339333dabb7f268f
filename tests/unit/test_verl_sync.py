"""Rollout servers without the student's weights end the job (`tests/cluster/test_broken_sync.py` breaks a whole one)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from iwopd.cluster.verl.errors import SyncError
from iwopd.cluster.verl.params import Settings
from iwopd.cluster.verl.sync import DIFFERENCE, check_sync
from iwopd.cluster.verl.translate import places, translate
from iwopd.config import Method, make_config

SETTINGS = Settings(Method(), mismatch_limit=0.01)


def tags(*versions: int | None) -> list[dict[str, Any]]:
    return [{"status": "success", "min_global_steps": version} for version in versions]


def test_answers_of_the_student_pass() -> None:
    check_sync(tags(4, 4, 4), {DIFFERENCE: 0.009}, SETTINGS, step=5)
    check_sync(tags(None, None), {}, SETTINGS, step=5)  # an engine that counts no versions, a batch without its log-probs
    check_sync(tags(4), {DIFFERENCE: 3.0}, Settings(Method()), step=5)  # started by hand, without a limit


@pytest.mark.parametrize("found", [0.011, math.nan])
def test_other_log_probs_end_the_job(found: float) -> None:
    with pytest.raises(
        SyncError, match=r"^step 5: .* differ from the trainer's by .*limit 0.01.*weight sync.*mismatch_limit"
    ) as caught:
        check_sync(tags(4), {DIFFERENCE: found}, SETTINGS, step=5)
    assert caught.value.exit_code == 1


def test_an_old_version_ends_the_job_at_any_learning_rate() -> None:
    with pytest.raises(SyncError, match="weights of step 3, and the student is at step 4: the weight sync did not reach all"):
        check_sync(tags(4, 3, 4), {DIFFERENCE: 1e-6}, SETTINGS, step=5)


@pytest.mark.parametrize(
    ("sections", "limit"),
    [
        ({}, 0.01),
        ({"models": {"dtype": "bfloat16"}}, 0.2),
        ({"engine": {"vllm": {"dtype": "float16"}}}, 0.1),
        ({"rollout": {"mismatch_limit": 0.03}}, 0.03),
    ],
)
def test_the_limit_is_the_local_engines(sections: dict[str, Any], limit: float, tmp_path: Any) -> None:
    tree: dict[str, Any] = {
        "models": {"student": "org/student", "teacher": "org/teacher"},
        "data": {"prompts": "prompts.jsonl"},
        "rollout": {"max_tokens": 100, "prompts_per_step": 48},
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    config = make_config(tree)
    assert f"+distillation.distillation_loss.iwopd.mismatch_limit={limit}" in translate(config, places(config, tmp_path))
