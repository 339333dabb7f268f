"""A micro world from nothing: the loss falls, and the trained model has learnt the form of a solution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from iwopd.tiny.architecture import ModelRecipe, ModelSize, Stage
from iwopd.tiny.world import WorldRecipe, open_world


def test_a_micro_world_learns_in_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IWOPD_CACHE", str(tmp_path))
    stage = Stage(120, 3, right=1.0, warmup=10, learning_rate=5e-3)
    models = [ModelRecipe(role, ModelSize(32, 2), (stage,)) for role in ("teacher", "student")]
    losses: dict[str, list[float]] = {"teacher": [], "student": []}
    world = open_world(WorldRecipe("micro", 3, *models), progress=lambda who, _s, _n, loss: losses[who].append(loss))
    for heard in losses.values():
        assert len(heard) == 12
        assert heard[0] > 1.5
        assert heard[-1] < 0.5 * heard[0]
        assert heard[-1] < 0.8
    model: Any = AutoModelForCausalLM.from_pretrained(world.teacher)
    prompts = world.eval_prompts(50)
    ids = torch.tensor([prompt.token_ids for prompt in prompts])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=world.max_response_tokens, do_sample=False)
    texts = world.tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
    boxed = sum(text.endswith("}") and text.count("\\boxed{") == 1 for text in texts)
    assert boxed >= 40, texts[:3]
