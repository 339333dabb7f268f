"""What a probe keeps on its way survives a stop, and belongs to one probe only."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from iwopd.analysis.probe.inputs import Material, Pair
from iwopd.analysis.probe.kept import Kept, identity_of, rollouts_as_json, rollouts_from_json
from iwopd.analysis.probe.settings import ProbeSettings
from iwopd.runs.owner import owned, owner_of
from iwopd.types import Prompt, Rollout
from models import make_model


def test_numbers_are_there_after_a_stop_in_the_middle_of_a_line(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "parts", "a")
    kept.numbers["0/opd"], kept.numbers["0/signed"] = 0.1, math.nan
    with (tmp_path / "parts" / "numbers.jsonl").open("a") as file:
        file.write('["0/surv')
    again = Kept(tmp_path / "parts", "a")
    assert dict(again.numbers) == {"0/opd": 0.1, "0/signed": again.numbers["0/signed"]}
    assert math.isnan(again.numbers["0/signed"])
    again.numbers["0/survival"] = 0.3
    assert Kept(tmp_path / "parts", "a").numbers["0/survival"] == 0.3


def test_a_file_that_is_cut_off_counts_as_none(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "parts", "a")
    kept.keep_tensors("x", {"full|opd": torch.ones(3)})
    found = kept.tensors("x")
    assert found is not None
    assert torch.equal(found["full|opd"], torch.ones(3))
    path = tmp_path / "parts" / "x.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    assert kept.tensors("x") is None


def test_another_probe_begins_anew(tmp_path: Path) -> None:
    Kept(tmp_path / "parts", "a").write("rollouts", [1])
    assert Kept(tmp_path / "parts", "a").read("rollouts") == [1]
    assert Kept(tmp_path / "parts", "b").read("rollouts") is None
    assert Kept(tmp_path / "parts", "a").read("rollouts") is None  # gone for good


def test_weights_prompts_and_settings_make_another_probe() -> None:
    prompts = [Prompt("a", (3, 4)), Prompt("b", (5,))]
    pair = Pair(None, make_model("qwen3", seed=0), make_model("qwen3", seed=1), "s", "t")
    material, settings = Material(prompts, solutions={"a": (5, 1)}), ProbeSettings(max_tokens=8)
    first = identity_of(pair, material, settings)
    assert identity_of(pair, material, replace(settings, skip=frozenset({"horizons"}), bins=3)) == first
    others = [
        (pair, material, replace(settings, seed=1)),
        (pair, material, replace(settings, skip=frozenset({"agreement"}))),
        (pair, replace(material, solutions={"a": (6, 1)}), settings),
        (pair, replace(material, prompts=prompts[:1]), settings),
        (replace(pair, teacher=make_model("qwen3", seed=2)), material, settings),
    ]
    assert len({first, *(identity_of(*other) for other in others)}) == 6


def test_rollouts_come_back_as_they_were() -> None:
    prompts = [Prompt("a", (3, 4)), Prompt("b", (5,))]
    rollouts = [
        Rollout(prompts[1], torch.tensor([7, 1]), torch.tensor([-0.1, -2.7182817]), "eos", 1),
        Rollout(prompts[0], torch.tensor([8]), torch.tensor([-1 / 3], dtype=torch.float64), "length"),
    ]
    for before, after in zip(rollouts, rollouts_from_json(rollouts_as_json(rollouts), prompts), strict=True):
        assert after.prompt is before.prompt
        assert torch.equal(after.response_ids, before.response_ids)
        assert torch.equal(after.rollout_logprobs, before.rollout_logprobs)
        assert after.rollout_logprobs.dtype == before.rollout_logprobs.dtype
        assert (after.stop_reason, after.sample) == (before.stop_reason, before.sample)


@pytest.mark.parametrize(
    "line",
    [b"\xff\xfe\n", b"{}\n", b"[1, 2]\n", b'["a"]\n', b'["a", "b"]\n', b'["a", 1' + b"0" * 400 + b"]\n", b"[" * 9999 + b"\n"],
)
def test_damaged_lines_are_measured_again(line: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept(tmp_path / "parts", "a")
    kept.numbers["0/opd"] = 0.1
    file = tmp_path / "parts" / "numbers.jsonl"
    file.write_bytes(line + file.read_bytes())
    assert dict(Kept(tmp_path / "parts", "a").numbers) == {"0/opd": 0.1}
    assert "1 damaged lines are left out" in caplog.text
    assert file.read_bytes().count(b"\n") == 1


@pytest.mark.parametrize("content", [b"\xff", b"[]", b'{"sha256": "0", "value": [1]}', b'[{"prompt": 3}]', b"[" * 9999])
def test_a_damaged_part_is_measured_again(content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept(tmp_path / "parts", "a")
    kept.write("rollouts", [{"ids": [1]}])
    (tmp_path / "parts" / "rollouts.json").write_bytes(content)
    assert Kept(tmp_path / "parts", "a").read("rollouts") is None
    assert "rollouts.json is damaged" in caplog.text


def test_a_folder_is_emptied_around_its_owner(tmp_path: Path) -> None:
    with owned(tmp_path / "parts", print):
        Kept(tmp_path / "parts", "a").write("rollouts", [1])
        assert Kept(tmp_path / "parts", "b").read("rollouts") is None
        assert owner_of(tmp_path / "parts") is not None
