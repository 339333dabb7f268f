"""`teacher.cache`: what was said before is said again bit for bit, and nothing else is believed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from iwopd.algo.views import NOTHING, TokenScores, Wanted
from iwopd.config import make_config
from iwopd.teacher.cached import CachedScorer, ScoreStore
from iwopd.teacher.local import LocalScorer
from iwopd.train.assembly import assemble
from iwopd.train.run import run_training
from iwopd.train.teacher_cache import caches_of
from iwopd.types import Prompt, Rollout
from models import make_model, save_pair


def rollout(number: int, length: int = 4) -> Rollout:
    ids = torch.arange(length) % 7 + number
    return Rollout(Prompt(str(number), (1, 2 + number)), ids, torch.zeros(length), "length")


class Counting(LocalScorer):
    """Never twice the same numbers, so that a test can tell who answered."""

    asked = 0

    def look(
        self, rollouts: Sequence[Rollout], wanted: Wanted = NOTHING, chosen: Sequence[Tensor] | None = None
    ) -> list[TokenScores]:
        self.asked += len(rollouts)
        found = super().look(rollouts, wanted, chosen)
        return [TokenScores(one.logprobs - 1e-3 * self.asked, one.entropy) for one in found]


@pytest.fixture
def scorer() -> Counting:
    return Counting(make_model("qwen3").eval(), vocab_size=21)


def kept(
    scorer: Counting, folder: Path, *, identity: Sequence[str] = ("t",), most: int = 10**9, **options: Any
) -> CachedScorer:
    return CachedScorer(scorer, ScoreStore(folder, most), lambda: identity, **options)


def test_the_second_time_is_the_first_bit_for_bit(scorer: Counting, tmp_path: Path) -> None:
    one = kept(scorer, tmp_path)
    first = one.score([rollout(1), rollout(2), rollout(1)])
    assert scorer.asked == 2  # the same answer twice in a batch is asked once
    assert one.take_counts() == (1, 2)
    again = kept(scorer, tmp_path)  # another process, later
    second = again.score([rollout(2), rollout(1), rollout(3)])
    assert scorer.asked == 3
    assert again.take_counts() == (2, 1)
    assert again.take_counts() == (0, 0)
    assert torch.equal(second[0], first[1])
    assert torch.equal(second[1], first[0])
    assert second[1].dtype == first[0].dtype


def test_minus_infinity_and_no_tokens_are_kept(tmp_path: Path) -> None:
    store = ScoreStore(tmp_path, 10**6)
    store.put("ab", torch.tensor([-1.5, -torch.inf]))
    store.put("cd", torch.empty(0))
    assert store.get("ab", 2) == pytest.approx(torch.tensor([-1.5, -torch.inf]))
    assert store.get("cd", 0) is not None
    assert store.get("ab", 3) is None  # of another length


@pytest.mark.parametrize(
    "other",
    [
        lambda scorer, folder: kept(scorer, folder, identity=("u",)),
        lambda scorer, folder: kept(scorer, folder, temperature=0.7),
    ],
    ids=["another teacher", "another temperature"],
)
def test_what_scores_depend_on_is_in_the_key(scorer: Counting, tmp_path: Path, other: Any) -> None:
    kept(scorer, tmp_path).score([rollout(1)])
    other(scorer, tmp_path).score([rollout(1)])
    assert scorer.asked == 2


def test_the_border_of_prompt_and_answer_is_in_the_key(scorer: Counting, tmp_path: Path) -> None:
    one = kept(scorer, tmp_path)
    ids = torch.tensor([3, 4, 5])
    long = Rollout(Prompt("a", (1, 2)), ids, torch.zeros(3), "length")
    short = Rollout(Prompt("a", (1, 2, 3)), ids[1:], torch.zeros(2), "length")
    assert one.key(long) != one.key(short)
    assert one.key(long) == one.key(Rollout(Prompt("b", (1, 2), "text"), ids, torch.ones(3) * -1, "eos"))  # names do not count


@pytest.mark.parametrize("how", ["cut", "empty", "a bit", "another key", "no tensors"])
def test_a_damaged_file_is_made_again(scorer: Counting, tmp_path: Path, how: str) -> None:
    one = kept(scorer, tmp_path)
    one.score([rollout(1), rollout(2)])
    key, other = one.key(rollout(1)), one.key(rollout(2))
    path = tmp_path / key[:2] / f"{key}.safetensors"
    data = bytearray(path.read_bytes())
    if how == "a bit":
        data[-1] ^= 1
    damaged = {"cut": data[: len(data) // 2], "empty": b"", "a bit": data, "no tensors": b"\0" * 8}
    path.write_bytes(bytes(damaged.get(how, b"")))
    if how == "another key":
        shutil.copy(tmp_path / other[:2] / f"{other}.safetensors", path)
    asked = scorer.asked
    values = one.score([rollout(1)])[0]
    assert scorer.asked == asked + 1
    assert torch.equal(kept(scorer, tmp_path).score([rollout(1)])[0], values)
    assert not list(tmp_path.glob("*/.tmp*"))


def test_the_oldest_go_first(scorer: Counting, tmp_path: Path) -> None:
    one = kept(scorer, tmp_path)
    one.score([rollout(1)])
    (file,) = tmp_path.glob("*/*.safetensors")
    size = file.stat().st_size
    small = kept(scorer, tmp_path, most=5 * size + size // 2)
    for number in range(2, 8):
        small.score([rollout(number)])
    left = list(tmp_path.glob("*/*.safetensors"))
    assert sum(path.stat().st_size for path in left) <= 5.5 * size
    asked = scorer.asked
    small.score([rollout(7), rollout(6)])
    assert scorer.asked == asked
    small.score([rollout(1)])
    assert scorer.asked == asked + 1


def test_whoever_wants_more_than_log_probs_asks_the_teacher(scorer: Counting, tmp_path: Path) -> None:
    one = kept(scorer, tmp_path)
    for _ in range(2):
        assert one.look([rollout(1)], Wanted(entropy=True))[0].entropy is not None
    assert scorer.asked == 2
    assert one.take_counts() == (0, 0)
    assert one.gives == scorer.gives
    assert next(one.paths("teacher")).scorer is scorer  # the doctor does not ask files


def test_a_run_counts_what_was_there(tmp_path: Path) -> None:
    """The same run again: every answer was scored before, and the run is the same bit for bit."""
    settings = save_pair(tmp_path) | {"steps": 2, "threads": torch.get_num_threads(), "tracking": {"console": "off"}}
    settings |= {"rollout": {"prompts_per_step": 4, "max_tokens": 8}, "checkpoint": {"every": 9}}
    records, cache = {}, {"cache": str(tmp_path / "kept")}
    for name, teacher in (("without", {}), ("first", cache), ("second", cache)):
        run_training(make_config({**settings, "teacher": teacher}), tmp_path / name, doctor=False)
        records[name] = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    assert [record["teacher/cache_misses"] for record in records["first"]] == [4, 4]
    assert [record["teacher/cache_hits"] for record in records["second"]] == [4, 4]
    assert "teacher/cache_hits" not in records["without"][0]
    for name in ("first", "second"):
        assert [record["loss"] for record in records[name]] == [record["loss"] for record in records["without"]]


def test_other_weights_are_another_teacher(tmp_path: Path) -> None:
    settings = save_pair(tmp_path) | {"teacher": {"cache": str(tmp_path / "kept"), "user": "1+{prompt}"}}
    keys = []
    for change in ({}, {"teacher_dtype": "bfloat16"}, {"teacher": str(tmp_path / "student")}):
        with assemble(make_config({**settings, "models": {**settings["models"], **change}}), print) as parts:
            (cache,) = caches_of(parts.teacher_scorer)
            keys.append(cache.key(rollout(1)))
    make_model("qwen3", seed=9).save_pretrained(tmp_path / "teacher")
    with assemble(make_config(settings), print) as parts:
        keys.append(caches_of(parts.teacher_scorer)[0].key(rollout(1)))
    assert len(set(keys)) == 4
