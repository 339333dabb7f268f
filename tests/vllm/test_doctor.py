"""The GPU checklist's look at vLLM, on the CPU build: in a process of its own, as `iwopd doctor --gpu` does it."""

from __future__ import annotations

from pathlib import Path

from iwopd.train.doctor.gpu.checklist import Subject, run_isolated


def test_the_checklist_starts_vllm_and_sees_it_follow_the_student(tmp_path: Path) -> None:
    found = list(run_isolated("vllm", Subject("cpu", None, ()), tmp_path, 900))
    assert [finding.level for finding in found] == ["pass"] * 3, "\n".join(finding.text() for finding in found)
    assert "it follows the student" in found[-1].message
