"""Checks of rollouts while others are written, a run's checker at work, and which checkers and prompts are refused."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from iwopd.algo.evidence import Evidence
from iwopd.algo.objectives import make_objective
from iwopd.config import Config, ConfigError, make_config
from iwopd.eval.checkers import CHECKERS, OwnProblems, math_checker
from iwopd.eval.task import Verdict
from iwopd.tiny import build_tokenizer
from iwopd.train import checking
from iwopd.train.checking import Checking, Judged
from iwopd.train.doctor import examine_recipe
from iwopd.train.pipeline import write_step
from iwopd.train.ranks import Ranks
from iwopd.train.reward import Rewards, reward_refuses
from iwopd.types import Prompt, Rollout
from models import save_pair
from support import length_mask
from waiting import PATIENCE, wait_until

NONE = math.nan


def rollout(name: str = "p", text: str = "1+2", *, answer: str | None = "3", stop: Any = "eos", sample: int = 0) -> Rollout:
    ids = torch.tensor(build_tokenizer().encode(text, add_special_tokens=False))
    return Rollout(Prompt(name, (3,), answer=answer), ids, torch.zeros(len(ids)), stop, sample)


def judged(judge: Any, count: int, *, workers: int = 2, timeout: float = 5.0) -> list[Judged]:
    """All verdicts on rollouts named by their places, added last first."""
    found = Checking(judge, workers=workers, timeout=timeout)
    for place in reversed(range(count)):
        found.add(place, rollout(str(place)))
    found.close()
    return found.judged()


def test_verdicts_come_in_the_order_of_places_and_an_error_costs_one() -> None:
    def judge(one: Rollout) -> Judged:
        if one.prompt.id == "3":
            raise RuntimeError("no luck")
        return Judged(int(one.prompt.id) / 8)

    found = judged(judge, 6)
    assert [one.reward for one in found if not one.failure] == [0, 1 / 8, 2 / 8, 4 / 8, 5 / 8]
    assert math.isnan(found[3].reward)
    assert found[3].failure == "RuntimeError: no luck"
    assert judged(judge, 0) == []


def test_a_check_that_hangs_costs_one_and_not_those_that_wait_behind_it() -> None:
    over, waited_for = threading.Event(), []

    def judge(one: Rollout) -> Judged:
        if one.prompt.id in "12" and not over.wait(PATIENCE):
            waited_for.append(one)
        return Judged(1.0)

    found = judged(judge, 5, workers=1, timeout=2.0)  # a busy machine gives no verdict at once
    over.set()
    assert not waited_for
    assert [one.reward for one in found if not one.failure] == [1, 1, 1]
    assert [one.failure for one in found if one.failure] == ["no verdict within 2 s (reward.timeout)"] * 2


def test_when_everything_hangs_nobody_waits_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "MOST_HANGING", 3)
    never, asked = threading.Event(), []

    def judge(one: Rollout) -> Judged:
        asked.append(one)
        never.wait(PATIENCE)
        return Judged(1.0)

    found = judged(judge, 100, workers=1, timeout=0.1)
    never.set()
    assert len(asked) == 3
    assert all(math.isnan(one.reward) for one in found)
    assert sum("not checked, because 3 checks" in one.failure for one in found) == 97


class OneByOne:
    """Writes rollouts one after the other and waits for the check of each before it goes on."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def sample(self, prompts: Sequence[Prompt], *, samples: int, finished: Any, **_: Any) -> list[Rollout]:
        written = [rollout(prompt.id, sample=sample) for prompt in prompts for sample in range(samples)]
        for place, one in enumerate(written):
            finished(place, one)
            wait_until(lambda place=place: len(self.seen) > place, "a check while others are written")
        return written


def test_rollouts_are_judged_while_others_are_written() -> None:
    seen: list[str] = []

    def judge(one: Rollout) -> Judged:
        seen.append(one.prompt.id)
        return Judged(one.sample / 2)

    sampler: Any = OneByOne(seen)
    threads = threading.active_count()
    checks = Checking(judge, workers=1, timeout=30)
    options: Any = {"seed": 0, "step": 1, "samples": 2, "checking": checks}
    written = write_step([Prompt("a", (3,)), Prompt("b", (3,))], sampler, None, Ranks(), **options)  # type: ignore[arg-type]
    assert [one.reward for one in written.judged(written.rollouts)] == [0, 0.5, 0, 0.5]
    assert [one.reward for one in written.judged(written.rollouts[1:2])] == [0.5]
    wait_until(lambda: threading.active_count() <= threads, "the end of a step's threads")


# --- a run's checker ----------------------------------------------------------------------------------------------------


def config(**reward: Any) -> Config:
    samples = {"rollout": {"samples": 4, **reward.pop("rollout", {})}}
    return make_config({"models": {"world": "clean"}, "reward": {"checker": "exact", **reward}, **samples})


def rewards_of(settings: Config, prompts: Sequence[Prompt] = ()) -> Rewards:
    found = Rewards.of(settings, build_tokenizer(), prompts)
    assert found is not None
    return found


def test_a_rollout_is_judged_by_its_text_without_special_tokens() -> None:
    one = rollout(text="3", answer="3")
    ended = Rollout(one.prompt, torch.cat([one.response_ids, torch.tensor([1])]), torch.zeros(2), "eos")
    assert rewards_of(config()).judge(ended) == Judged(1.0)
    assert rewards_of(config()).judge(rollout(text="4", answer="3")) == Judged(0.0)


@pytest.mark.parametrize("truncated", ["keep", "mask", "drop"])
def test_what_was_cut_off_is_judged_only_if_it_teaches(truncated: str) -> None:
    found = rewards_of(config(rollout={"truncated": truncated})).judge(rollout(text="4", stop="length"))
    assert (found.reward == 0) is (truncated == "keep")
    assert found.failure == ""


@pytest.mark.parametrize(
    ("verdicts", "words"),
    [
        ([Verdict("timeout", 0.0, None, "no verdict", judged=False)], "timeout: no verdict"),
        ([], "0 verdicts"),
        ([Verdict("x", 1.5)], r"1\.5; it must lie"),
        ([Verdict("x", NONE)], "nan; it must lie"),
    ],
)
def test_a_checker_that_cannot_tell_gives_no_verdict(
    verdicts: list[Verdict], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CHECKERS._items, "theirs", lambda prompts, texts: verdicts)
    rewards = rewards_of(config(checker="theirs"))
    (found,) = judged(rewards.judge, 1)
    assert math.isnan(found.reward)
    assert re.search(words, found.failure)


def test_the_students_own_failures_are_wrong_and_the_checkers_are_nothing() -> None:
    golds = ["3", "3", r"\frac{"]
    texts = ["no box", r"\boxed{\frac{}", r"\boxed{4}"]
    found = math_checker([Prompt("p", (3,), answer=gold) for gold in golds], texts)
    assert [one.score for one in found] == [0, 0, 0]
    assert [one.judged for one in found] == [True, True, False]


def test_evidence_has_what_was_said_and_metrics_both_terms() -> None:
    rewards = rewards_of(config(coefficient=0.5, normalize="mean"))
    rollouts = [rollout("a"), rollout("a", sample=1), rollout("b"), rollout("b", sample=1)]
    said = [Judged(1.0), Judged(0.0), Judged(1.0), Judged(NONE, "Oops: gone")]
    mask = length_mask([2, 1, 2, 2])
    values = torch.zeros(4, 2)
    found = rewards.step(Evidence(values - 1, values, mask), rollouts, lambda: said)
    assert torch.equal(found.evidence.correct.nan_to_num(-1), torch.tensor([[1.0, 1], [0, 0], [1, 1], [-1, -1]]))  # type: ignore[union-attr]
    assert found.evidence.reward_advantages.tolist() == [[0.25, 0.25], [-0.25, 0], [0, 0], [0, 0]]  # type: ignore[union-attr]
    numbers = found.metrics(make_objective({}).signal(found.evidence))
    assert {name: value for name, value in numbers.items() if name != "time/reward"} == {
        "reward/mean": pytest.approx(2 / 3),
        "reward/groups_used": 0.5,
        "reward/failed": 1,
        "reward/advantage_abs_mean": pytest.approx(0.75 / 7),
        "distillation/advantage_abs_mean": 1.0,
    }
    notice = rewards.notice()
    assert notice is not None
    assert "'exact' gave no verdict on 1 of 4 rollouts" in notice
    assert "Oops: gone" in notice
    rewards.step(Evidence(values, values, mask), rollouts, lambda: said)
    assert rewards.notice() is None


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ({"checker": "maths"}, "reward.checker is 'maths': unknown checker 'maths'; did you mean 'math'?"),
        ({"checker": "echo"}, "judges the problems of its own tasks only"),
        ({"checker": "code", "timeout": 5}, "reward.timeout is 5"),
    ],
)
def test_a_checker_that_cannot_work_is_refused_before_anything_is_loaded(
    reward: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CHECKERS._items, "echo", OwnProblems(lambda spec, opening: pytest.fail("opened")))
    settings = config(**reward)
    (refused,) = reward_refuses(settings)
    assert words in refused.message
    found = [one for one in examine_recipe(settings, tmp_path) if one.check == "reward"]
    assert [one.level for one in found] == ["fail"]


def test_a_few_prompts_that_cannot_be_judged_do_not_stop_a_run(tmp_path: Path) -> None:
    pair = save_pair(tmp_path)
    file = tmp_path / "prompts.jsonl"
    records = [json.loads(line) | {"tests": ["assert f(1) == 1"]} for line in file.read_text().splitlines()]
    records[7]["tests"] = ["assert g(open('x')) == 1"]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = make_config({**pair, "rollout": {**pair["rollout"], "samples": 2}, "reward": {"checker": "code"}})
    (found,) = [one for one in examine_recipe(settings, tmp_path) if one.check == "reward"]
    assert found.level == "warn"
    assert "cannot judge answers to 1 of 48 training prompts, such as 'p7'" in found.message
    prompts = [Prompt(f"p{number}", (3,), metadata={"tests": one["tests"]}) for number, one in enumerate(records)]
    rewards = rewards_of(config(checker="code"), prompts)
    verdict = rewards.judge(Rollout(prompts[7], torch.tensor([3, 1]), torch.zeros(2), "eos"))
    assert math.isnan(verdict.reward)
    assert "is not of the form" in verdict.failure


def test_prompts_without_answers_are_refused_by_name(tmp_path: Path) -> None:
    pair = save_pair(tmp_path)
    settings = make_config({**pair, "rollout": {**pair["rollout"], "samples": 2}, "reward": {"checker": "exact"}})
    words = "reward.checker = 'exact' cannot judge answers to 48 of 48 training prompts, such as 'p0': it has no answer"
    (found,) = [one for one in examine_recipe(settings, tmp_path) if one.level == "fail"]
    assert words in found.message
    prompts = [Prompt(f"p{number}", (3,), answer="3" if number else None) for number in range(3)]
    with pytest.raises(ConfigError, match="1 of 3 training prompts, such as 'p0'"):
        rewards_of(config(), prompts)
    with pytest.raises(ConfigError, match="'p0': it is not a problem of an embedded world"):
        rewards_of(config(checker="tiny"), prompts)
    with pytest.raises(ConfigError, match="'p0': it has neither a field 'tests' nor an answer"):
        rewards_of(config(checker="code"), prompts)
