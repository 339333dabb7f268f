"""The noise floor of real runs: float32 pairs are quiet, noisy paths are warned of, and every step's record has the number."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor

from iwopd.config import Config, make_config
from iwopd.teacher.local import LocalScorer
from iwopd.train.assembly import assemble
from iwopd.train.doctor import examine_models
from iwopd.train.doctor.findings import Finding
from iwopd.train.doctor.noise import check_noise, measure_noise
from iwopd.train.doctor.working import known_rollouts
from iwopd.train.parts import Parts
from iwopd.train.run import run_training
from iwopd.types import Rollout
from models import save_pair


def pair(folder: Path, *, twins: bool, **changes: Any) -> Config:
    """A random pair; `twins`: the teacher is the student."""
    settings = save_pair(folder) | {"threads": torch.get_num_threads()}
    if twins:
        shutil.rmtree(folder / "teacher")
        shutil.copytree(folder / "student", folder / "teacher")
    for name, value in changes.items():
        settings[name] = {**settings[name], **value} if isinstance(value, dict) else value
    return make_config(settings)


@pytest.fixture
def opened() -> Iterator[Callable[[Config], AbstractContextManager[Parts]]]:
    """Opens the parts of a run; runs of one process share accelerate's precision unless it is forgotten."""

    @contextmanager
    def parts_of(config: Config) -> Iterator[Parts]:
        AcceleratorState._reset_state()
        with assemble(config, print) as parts:
            yield parts

    yield parts_of
    AcceleratorState._reset_state()


def noise(config: Config, parts: Parts) -> Finding:
    (finding,) = check_noise(config, parts, known_rollouts(config, parts, 1))
    return finding


def test_a_student_that_teaches_itself_in_float32_is_quiet(tmp_path: Path, opened: Any) -> None:
    config = pair(tmp_path, twins=True)
    with opened(config) as parts:
        found = list(examine_models(config, parts, tmp_path))
        finding = next(finding for finding in found if finding.check == "noise floor")
        assert finding.level == "pass", finding.text()
        assert finding.numbers["gap/noise_floor"] < 1e-5
        _, _, floor = measure_noise(config, parts, known_rollouts(config, parts, 1))
        assert floor.gap < 1e-5


class Noisy(LocalScorer):
    """Scores that differ from call to call, by about 0.01 a token."""

    calls = 0

    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        scores = super().score(rollouts)
        self.calls += 1
        generator = torch.Generator().manual_seed(self.calls)
        return [values - 0.01 * torch.rand(len(values), generator=generator) for values in scores]


def test_a_path_that_is_never_twice_the_same_is_warned_of(tmp_path: Path, opened: Any) -> None:
    config = pair(tmp_path, twins=True)
    with opened(config) as parts:
        parts.teacher_scorer = Noisy(parts.teacher_scorer.lm.model, vocab_size=len(parts.tokenizer))
        parts.teacher_scorer.half = True  # in half precision the other checks allow as much
        found = list(examine_models(config, parts, tmp_path))
        finding = next(finding for finding in found if finding.check == "noise floor")
    assert finding.level == "warn"
    assert 0.002 < finding.numbers["gap/noise_teacher"] < 0.01
    assert finding.numbers["gap/noise_student"] < 1e-5
    assert "over 24 tokens sums up" in finding.message
    assert "models.teacher_dtype" in finding.remedy or "models.attention" in finding.remedy
    assert {finding.level for finding in found} == {"pass", "warn"}  # no other check sees it


def test_the_floor_of_bfloat16_is_what_the_pipeline_finds_between_a_model_and_itself(tmp_path: Path, opened: Any) -> None:
    """The student under autocast, the teacher not: mean |gap| of equal models is the floor."""
    config = pair(tmp_path, twins=True, precision="bf16")
    with opened(config) as parts:
        student, teacher, floor = measure_noise(config, parts, known_rollouts(config, parts, 1))
        assert teacher.difference < 1e-5
        assert student.difference > 1e-3
        assert floor.total == pytest.approx(floor.gap, rel=0.05)
        assert noise(config, parts).level == "warn"


def test_a_bfloat16_teacher_is_compared_with_its_float32_numbers(tmp_path: Path, opened: Any) -> None:
    config = pair(tmp_path, twins=True, models={"teacher_dtype": "bfloat16"})
    with opened(config) as parts:
        finding = noise(config, parts)
        student, teacher, _ = measure_noise(config, parts, known_rollouts(config, parts, 1))
    assert student.difference < 1e-5
    assert (teacher.difference > 1e-3, teacher.path) == (True, "float32")
    assert finding.level == "warn"
    assert "models.teacher_dtype" in finding.remedy


def test_bfloat16_is_no_fault_where_the_pair_is_far_apart(tmp_path: Path, opened: Any) -> None:
    config = pair(tmp_path, twins=False, precision="bf16")
    with opened(config) as parts:
        finding = noise(config, parts)
    assert finding.level == "pass", finding.text()
    assert finding.numbers["gap/noise_floor"] > 1e-3


def test_every_record_of_a_run_has_the_floor_also_after_a_resume(tmp_path: Path) -> None:
    config = pair(tmp_path, twins=False).model_copy(update={"steps": 2})
    run_training(config, tmp_path / "run")
    run_training(config.model_copy(update={"steps": 3}), tmp_path / "run", resume=True)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert len({record["gap/noise_floor"] for record in records}) == 1  # a resumed run's records are those of one run
    for record in records:
        assert 0 <= record["gap/noise_floor"] < 1e-5 < record["gap/abs_mean"]
        assert record["gap/noise_floor"] == record["gap/noise_student"] + record["gap/noise_teacher"]
    run_training(config, tmp_path / "unexamined", doctor=False)
    assert "gap/noise_floor" not in json.loads((tmp_path / "unexamined" / "metrics.jsonl").read_text().splitlines()[0])
