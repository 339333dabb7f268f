"""A LoRA student on verl, with several samples of each prompt and a task reward beside the teacher; then its export."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cluster_support import lines, steps, train
from iwopd import tiny
from iwopd.algo.rewards import group_advantages
from iwopd.tiny import open_world

RUN_SECONDS = 3600
STEPS, PROMPTS, SAMPLES = 2, 8, 2
SETTINGS = (
    *("--lora.rank", "4", "--lora.alpha", "8", "--lora.targets", "['q_proj', 'v_proj', 'down_proj']"),
    *("--optim.lr", "0.003", "--eval.prompts", "0"),
    *("--rollout.prompts-per-step", str(PROMPTS), "--rollout.samples", str(SAMPLES)),
    *("--reward.checker", "tiny", "--reward.coefficient", "0.5", "--reward.normalize", "mean"),
)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    open_world("clean")  # trains its models if they are not in the cache
    folder = tmp_path_factory.mktemp("adapter")
    dump = f"['trainer.rollout_data_dir={folder / 'rollouts'}']"
    with train(folder, "run", *SETTINGS, "--cluster.overrides", dump, steps=STEPS) as job:
        assert job.finish(RUN_SECONDS) == 0, job.text()[-3000:]
    return folder / "run"


def test_the_servers_have_the_adapter(run: Path) -> None:
    """After every update its matrices are sent, and the frozen weights are the engine's own: correction ratios stay at 1."""
    metrics = steps(run)
    assert [step["step"] for step in metrics] == list(range(1, STEPS + 1))
    for step in metrics:
        assert step["correction/ratio_deviation"] < 1e-3
        assert step["rollouts"] == PROMPTS * SAMPLES
        assert step["grad_norm"] > 0


def test_rewards_are_those_of_the_checker_and_the_loss_has_them(run: Path) -> None:
    """The answers that verl wrote down, judged again here; the one update of a step starts at ratio 1."""
    tokenizer = open_world("clean").tokenizer
    for step in steps(run):
        rows = lines(run.parent / "rollouts" / f"{step['step']}.jsonl")
        assert len(rows) == PROMPTS * SAMPLES
        prompts = [json.loads(row["gts"]) for row in rows]
        texts = [row["output"].removesuffix(tokenizer.eos_token) for row in rows]
        right = [float(tiny.check(prompt[3]["expression"], text)) for prompt, text in zip(prompts, texts, strict=True)]
        numbers: dict[str, int] = {}
        groups = [numbers.setdefault(prompt[0], len(numbers)) for prompt in prompts]
        assert len(numbers) == PROMPTS
        assert step["reward/mean"] == pytest.approx(sum(right) / len(right))
        assert step["reward/failed"] == 0
        of_group = defaultdict(set)
        for group, reward in zip(groups, right, strict=True):
            of_group[group].add(reward)
        assert step["reward/groups_used"] == pytest.approx(sum(len(found) > 1 for found in of_group.values()) / PROMPTS)
        lengths = torch.tensor([len(tokenizer(row["output"])["input_ids"]) for row in rows], dtype=torch.float64)
        added = 0.5 * group_advantages(torch.tensor(right), torch.tensor(groups), normalize="mean")
        if int(lengths.sum()) == step["tokens"]:  # else verl's text lacks the end tokens
            expected = step["advantages/mean"] + float((added * lengths).sum() / lengths.sum())
            assert step["loss"] == pytest.approx(-expected, rel=1e-3, abs=1e-4)
        assert step["reward/advantage_abs_mean"] > 0 or step["reward/groups_used"] == 0
    assert any(step["reward/groups_used"] > 0 for step in steps(run))  # else nothing was shown


def test_the_adapter_is_saved_in_float32_and_moved(run: Path) -> None:
    folder = run / "checkpoints" / f"step-{STEPS:06d}" / "model"
    tensors = load_file(folder / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in tensors} == {"q_proj", "v_proj", "down_proj"}
    assert all(values.dtype == torch.float32 for values in tensors.values())
    assert all(values.abs().max() > 0 for name, values in tensors.items() if "lora_B" in name)
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["inference_mode"]) == (4, 8, True)
    assert settings["base_model_name_or_path"] == str(open_world("clean").student.absolute())
    assert "LoRA adapter, rank 4" in (folder / "README.md").read_text()


def test_it_is_exported_as_from_the_local_engine(run: Path, tmp_path: Path) -> None:
    """The adapter on its base, and the merged model, say the same; and not what the student said before."""
    ids = torch.tensor([open_world("clean").tokenizer("1+2*3")["input_ids"]])
    said = {}
    for name, flags in (("adapter", []), ("merged", ["--merge"])):
        command = [sys.executable, "-m", "iwopd", "export", str(run), str(tmp_path / name), *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert name in done.stdout
        said[name] = logits(tmp_path / name, ids)
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    torch.testing.assert_close(said["adapter"], said["merged"], rtol=1e-4, atol=1e-4)
    assert float((said["merged"] - logits(open_world("clean").student, ids)).abs().max()) > 1e-3


def logits(folder: Any, ids: torch.Tensor) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found
