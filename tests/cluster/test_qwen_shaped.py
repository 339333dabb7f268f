"""What users of Qwen models set: bfloat16 over float32 shards, gradient checkpointing, a chat template, two teachers.

verl's own token wiring for Qwen is at work here: the tokenizer has Qwen's tokens.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from cluster_support import Job, lines, steps
from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.teacher.local import LocalScorer
from iwopd.types import Prompt
from qwen_shaped import ROWS, TEMPLATE, qwen_tokenizer, save_qwen_model

RUN_SECONDS = 3600
STEPS, PROMPTS, TOKENS, LR = 2, 8, 24, 1e-4
OWN = "{{ '<|im_start|>system\\nAnswer ' + style + '.<|im_end|>\\n' }}" + TEMPLATE
RECIPE = """
seed = 0
steps = {steps}
[models]
student = "{folder}/student"
teacher = "{folder}/same"
dtype = "bfloat16"
[teacher.others.other]
model = "{folder}/other"
[data]
prompts = "{folder}/prompts.jsonl"
max_prompt_tokens = 128
chat_template = "{folder}/template.jinja"
chat_template_kwargs = {{style = "briefly"}}
[rollout]
prompts_per_step = {prompts}
max_tokens = {tokens}
[engine.vllm]
tensor_parallel = 2
[optim]
lr = {lr}
weight_decay = 0.0
gradient_checkpointing = true
[checkpoint]
every = {steps}
[tracking]
console = "off"
[cluster]
gpus_per_node = 4
teacher_gpus = 2
overrides = ["trainer.rollout_data_dir={folder}/rollouts"]
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first teacher is the student as it begins, the other one a stranger; a third of the prompts names the stranger."""
    folder = tmp_path_factory.mktemp("qwen")
    for name, seed in (("student", 1), ("same", 1), ("other", 2)):
        save_qwen_model(folder / name, seed=seed)
    (folder / "template.jinja").write_text(OWN)
    rng = random.Random(0)
    with (folder / "prompts.jsonl").open("w") as file:
        for number in range(PROMPTS * STEPS):
            row = {"id": f"p{number}", "prompt": f"What is {rng.randrange(100)} and {rng.randrange(100)}?"}
            file.write(json.dumps(row | ({"teacher": "other"} if number % 3 == 0 else {})) + "\n")
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(folder=folder, steps=STEPS, prompts=PROMPTS, tokens=TOKENS, lr=LR))
    command = [sys.executable, "-m", "iwopd", "train", str(recipe), "--engine", "verl", "--out", str(folder / "run")]
    with Job(command, log=folder / "run.log") as job:
        assert job.finish(RUN_SECONDS) == 0, job.text()[-3000:]
    return folder


def test_the_precision_is_what_the_recipe_says(folder: Path) -> None:
    """Bfloat16 on both sides: their log-probs differ by its rounding, and by no more."""
    metrics = steps(folder / "run")
    assert [step["step"] for step in metrics] == [1, 2]
    for step in metrics:
        assert 1e-5 < step["correction/logprob_difference"] < 0.05
        assert step["correction/ratio_mean"] == pytest.approx(1, abs=0.05)


def test_master_weights_are_float32(folder: Path) -> None:
    """Adam moves a weight by about the learning rate, a fifth of what bfloat16 resolves at their size: none of it is lost."""
    before = load_file(folder / "student" / "model.safetensors")
    after = load_file(folder / "run" / "checkpoints" / f"step-{STEPS:06d}" / "model" / "model.safetensors")
    moved = torch.cat([(after[name] - before[name]).abs().flatten() for name in before if "mlp" in name])
    assert all(values.dtype == torch.float32 for values in after.values())
    assert float((moved > LR / 10).double().mean()) > 0.8
    assert float(moved.max()) < 4 * STEPS * LR
    assert any(not torch.equal(values, values.to(torch.bfloat16).float()) for values in after.values())


def test_verl_renders_with_the_recipes_template(folder: Path) -> None:
    """The dump is verl's own, of the ids that its agent loop made."""
    for step in range(1, STEPS + 1):
        rows = lines(folder / "rollouts" / f"{step}.jsonl")
        assert len(rows) == PROMPTS
        for row in rows:
            assert "Answer briefly." in row["input"]
            assert row["input"].rstrip().endswith("</think>")  # the template's own setting reached it, too: thinking is off


def test_prompts_are_scored_by_the_teacher_that_they_name(folder: Path) -> None:
    """In the first step the first teacher is the student itself, without a gap: what there is comes from the other one."""
    table = pq.read_table(folder / "run" / "verl" / "train.parquet").to_pylist()
    named = [row["teacher"] for row in table if row["extra_info"]["step"] == 1]
    share = named.count("other") / PROMPTS
    assert 0 < share < 1
    expected = share * gap_of_strangers(folder)
    assert steps(folder / "run")[0]["gap/abs_mean"] == pytest.approx(expected, rel=0.5)


def gap_of_strangers(folder: Path) -> float:
    """Mean |gap| between student and stranger on the student's own answers."""
    student, other = load(folder / "student"), load(folder / "other")
    ids = qwen_tokenizer()("What is 1 and 2?")["input_ids"]
    prompts = [Prompt(str(number), tuple(ids)) for number in range(16)]
    rollouts = LocalSampler(student, SamplingSettings(max_tokens=TOKENS)).sample(prompts, seed=0, step=1)
    pairs = zip(LocalScorer(student).score(rollouts), LocalScorer(other).score(rollouts), strict=True)
    return float(torch.cat([theirs - ours for ours, theirs in pairs]).abs().mean())


def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert model.config.vocab_size == ROWS
    return model.eval()
