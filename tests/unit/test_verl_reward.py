"""Task rewards inside verl's reward workers: verdicts, and what is no verdict."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from iwopd.cluster.verl import reward
from iwopd.cluster.verl.reward import FAILURE, REWARD, TRAINING, judge, read_prompt, read_verdict, written_prompt
from iwopd.cluster.verl.translate import places, translate
from iwopd.config import make_config
from iwopd.data.fields import DataError
from iwopd.eval.checkers import CHECKERS
from iwopd.eval.task import Verdict
from iwopd.types import Prompt
from waiting import PATIENCE

PROMPT = Prompt("p1", (3, 4), answer="42", begun="<think>", metadata={"messages": [{"role": "user", "content": "?"}], "n": 1})
NEVER = threading.Event()


def strange(prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
    """A checker of somebody else."""
    (prompt,), (text,) = prompts, texts
    if "raise" in text:
        raise RuntimeError("the disk is full")
    if "hang" in text:
        NEVER.wait(PATIENCE)
    return [
        Verdict("timeout", 0.0, detail="too slow", judged=False) if "slow" in text else Verdict("correct", 0.5, prompt.answer)
    ]


@pytest.fixture(autouse=True)
def _strange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHECKERS._items, "strange", strange)
    reward._found.cache_clear()


def verdict_on(answer: str, *, checker: str = "strange", timeout: float = 30.0, source: str = TRAINING) -> Any:
    return asyncio.run(judge(source, answer, written_prompt(PROMPT), checker=checker, timeout=timeout, extra_info={}))


def test_a_prompt_arrives_as_checkers_need_it() -> None:
    found = read_prompt(written_prompt(PROMPT))
    assert (found.id, found.answer, found.begun, dict(found.metadata)) == ("p1", "42", "<think>", dict(PROMPT.metadata))
    with pytest.raises(DataError, match="prompt 'p2' has a field that a verl job cannot be given"):
        written_prompt(Prompt("p2", (1,), metadata={"odd": object()}))


@pytest.mark.parametrize(
    ("answer", "score", "failure"),
    [
        ("fine", 0.5, ""),
        ("slow", math.nan, "timeout: too slow"),
        ("raise", math.nan, "RuntimeError: the disk is full"),
        ("hang", math.nan, "no verdict within 0.2 s (reward.timeout)"),
    ],
)
def test_verl_gets_nothing_and_the_verdict_stands_beside_it(answer: str, score: float, failure: str) -> None:
    found = verdict_on(answer, timeout=0.2 if answer == "hang" else 30.0)
    assert found["score"] == 0.0
    told = read_verdict({"reward_extra_info": found})
    assert told.reward == pytest.approx(score, nan_ok=True)
    assert told.failure == failure


def test_wrong_is_not_the_same_as_no_verdict() -> None:
    assert verdict_on("41", checker="exact")[REWARD] == 0.0
    assert math.isnan(verdict_on("slow")[REWARD])


def test_problems_of_an_evaluation_are_not_judged_here() -> None:
    assert verdict_on("42", source="aime24") == 0.0


@pytest.mark.parametrize("extra", [{}, {"reward_extra_info": {"acc": 0.0}}, None])
def test_a_worker_that_said_nothing_gives_no_verdict(extra: Any) -> None:
    told = read_verdict(extra)
    assert math.isnan(told.reward)
    assert "gave no answer" in told.failure


def test_verdicts_of_a_batch_as_verls_queue_gives_it() -> None:
    """One row per rollout, in any order; texts and tables are columns of their own kind there."""
    from tensordict import NonTensorStack, TensorDict

    from iwopd.cluster.verl.hook import Verdicts

    told = [{"reward_extra_info": {"score": 0.0, REWARD: value, FAILURE: ""}} for value in (1.0, 0.0, math.nan)]
    columns = {"uid": NonTensorStack("b", "a", "b"), "extra_fields": NonTensorStack(*told)}
    data = TensorDict({"x": torch.zeros(3), **columns}, batch_size=3)
    found = Verdicts.of(data)
    assert found.groups.tolist() == [0, 1, 0]
    assert [one.reward for one in found.judged] == pytest.approx([1.0, 0.0, math.nan], nan_ok=True)
    assert found.failures == []
    assert set(data.keys()) == {"x"}  # what is left is tensors


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # verl, Ray and their dependencies warn at import
def test_through_verls_own_reward_manager(tmp_path: Any) -> None:
    """Settings composed by Hydra from our overrides, the function loaded by verl, the answer decoded by verl."""
    import numpy as np
    from tensordict import TensorDict
    from verl.protocol import DataProto
    from verl.trainer.ppo.reward import get_custom_reward_fn, resolve_reward_manager_cls

    from models import byte_tokenizer
    from verl_support import verl_config

    config = make_config(
        {
            "models": {"student": "org/student", "teacher": "org/teacher"},
            "data": {"prompts": "prompts.jsonl"},
            "rollout": {"max_tokens": 100, "prompts_per_step": 48, "samples": 2},
            "reward": {"checker": "exact", "timeout": 7.0},
        }
    )
    tree = verl_config(*(item for item in translate(config, places(config, tmp_path)) if "teacher_models" not in item))
    tokenizer = byte_tokenizer()

    async def told(answer: str) -> Any:
        manager = resolve_reward_manager_cls(tree)(tree, tokenizer, get_custom_reward_fn(tree))
        ids = torch.tensor([[*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]])
        row = {"data_source": TRAINING, "reward_model": {"ground_truth": written_prompt(PROMPT)}, "extra_info": {}}
        columns = {name: np.array([value], dtype=object) for name, value in row.items()}
        batch = TensorDict({"responses": ids, "attention_mask": torch.ones_like(ids)}, batch_size=1)
        return await manager.run_single(DataProto(batch=batch, non_tensor_batch=columns))

    for answer, right in (("<think> </think>42", 1.0), ("</think> 42 ", 1.0), ("</think>43", 0.0)):
        found = asyncio.run(told(answer))
        assert found["reward_score"] == 0.0
        assert found["reward_extra_info"] == {"score": 0.0, REWARD: right, FAILURE: ""}
