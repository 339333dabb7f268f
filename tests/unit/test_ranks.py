"""Several processes, as far as one can tell without starting them: words for lost ones, places of teachers, shared checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from iwopd.config import Config, ConfigError, make_config
from iwopd.errors import UserError
from iwopd.eval.runner import Answer, evaluate
from iwopd.eval.task import Task, Verdict
from iwopd.tiny import build_tokenizer
from iwopd.train import run
from iwopd.train.doctor.machine import check_ranks
from iwopd.train.ranks import Launched, RanksError, launched, lost_contact
from iwopd.train.teachers import check_teacher_device
from iwopd.types import Prompt, Rollout

TIMED_OUT = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation"
CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:10164. GLHF!"


def test_what_was_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert launched() == Launched(1, 1, 0)
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert launched() == Launched(16, 16, 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert launched() == Launched(16, 8, 3)


@pytest.mark.parametrize(
    "error", [RuntimeError(TIMED_OUT), dist.DistStoreError("Timed out after 21 seconds waiting for clients")]
)
def test_a_process_that_waited_too_long_says_so(error: RuntimeError) -> None:
    said = str(lost_contact(error, 20.0))
    assert "waited 20 seconds for another one (rank_timeout)" in said
    assert "raise rank_timeout" in said


def test_a_lost_process_is_told_from_other_errors() -> None:
    said = str(lost_contact(RuntimeError(CLOSED), 20.0))
    assert "has lost another one, whose own output says why" in said
    assert "Connection closed by peer" in said
    assert lost_contact(RuntimeError("CUDA error: timeout"), 20.0) is None

    class OtherError(UserError, RuntimeError):
        pass

    assert lost_contact(OtherError(TIMED_OUT), 20.0) is None


def test_a_run_ends_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any) -> Any:
        raise RuntimeError(TIMED_OUT)

    monkeypatch.setattr(run, "assemble", gone)
    with pytest.raises(RanksError, match="waited 7200 seconds"):
        run.run_training(make_config({"models": {"world": "clean"}}), tmp_path / "run", doctor=False)


# --- the teacher's device -------------------------------------------------------------------------------------------------


def settings(device: str | None, **more: Any) -> Config:
    models = {"student": "s", "teacher": "t", "teacher_device": device}
    return make_config({"models": models, "data": {"prompts": "p.jsonl"}, **more})


@pytest.mark.parametrize("device", ["auto", "cuda:1", "cuda:0"])
def test_a_device_for_all_processes_copies_is_refused(device: str) -> None:
    config = settings(device)
    check_teacher_device(config, 1)
    with pytest.raises(ConfigError, match=rf"models\.teacher_device = '{device}' with 8 processes.*teacher\.urls"):
        check_teacher_device(config, 8)
    (finding,) = check_ranks(config, Launched(16, 8))
    assert (finding.level, finding.check) == ("fail", "processes")
    assert list(check_ranks(config, Launched(2, 1))) == []  # one on each machine


@pytest.mark.parametrize("device", [None, "cpu", "cuda"])
def test_a_device_of_ones_own_is_not(device: str | None) -> None:
    check_teacher_device(settings(device), 8)


def test_a_teacher_elsewhere_has_no_device() -> None:
    served = {"urls": ["http://gpu:8000"]}
    check_teacher_device(settings("auto", teacher=served), 8)
    with pytest.raises(ConfigError, match="teacher_device"):
        check_teacher_device(settings("auto", teacher={**served, "others": {"code": {"model": "c"}}}), 8)


# --- answers --------------------------------------------------------------------------------------------------------------


def test_whoever_writes_an_answer_checks_it() -> None:
    """Two processes, one after the other: each checks its own, and all is in the order of one."""
    tokenizer, checked = build_tokenizer(), []
    prompts = [Prompt(f"p{number}", (3,)) for number in range(5)]

    def check(asked: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        checked.append([prompt.id for prompt in asked])
        return [
            Verdict("correct", float(int(prompt.id[1:]) % 2), detail=text) for prompt, text in zip(asked, texts, strict=True)
        ]

    def write(asked: Sequence[Prompt]) -> list[Rollout]:
        ids = torch.tensor([4, 5])
        return [Rollout(prompt, ids, torch.zeros(2), "length", sample) for prompt in asked for sample in range(2)]

    def share(asked: Sequence[Prompt], work: Callable[[Sequence[Prompt]], list[Answer]]) -> list[Answer]:
        parts = [work(asked[rank::2]) for rank in range(2)]
        return [answer for place in range(len(asked)) for answer in parts[place % 2][place // 2 * 2 : place // 2 * 2 + 2]]

    task = Task("numbers", prompts, check)
    alone = evaluate(task, write, tokenizer, samples=2)
    assert checked == [[f"p{number}" for number in range(5) for _ in range(2)]]
    checked.clear()
    shared = evaluate(task, write, tokenizer, samples=2, share=share)
    assert checked == [["p0", "p0", "p2", "p2", "p4", "p4"], ["p1", "p1", "p3", "p3"]]
    assert [(one.prompt.id, one.sample) for one in shared.rollouts] == [(one.prompt.id, one.sample) for one in alone.rollouts]
    assert (shared.texts, shared.verdicts) == (alone.texts, alone.verdicts)
    assert torch.equal(shared.result.scores, alone.result.scores)


def test_a_process_without_problems_checks_nothing() -> None:
    def never(*_: Any) -> list[Verdict]:
        raise AssertionError("there is nothing to check")

    task = Task("numbers", [], never)
    assert evaluate(task, lambda _: [], build_tokenizer()).verdicts == []
