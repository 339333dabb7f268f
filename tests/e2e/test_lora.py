"""LoRA students: everything that holds for whole students, and the adapter switched off is the reference."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from iwopd import adapters, lean_model
from iwopd.adapters import adapter_off, add_adapter, base_fingerprint
from iwopd.cli import main
from iwopd.config import make_config
from iwopd.lean_model import lean_obstacle
from iwopd.lm import ResponseModel, Sequences
from iwopd.models import ModelError
from iwopd.quantization import quantization
from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.runs.directory import RunDirectory
from iwopd.teacher.local import LocalScorer
from iwopd.train.assembly import assemble
from iwopd.train.checkpoint import CheckpointError
from iwopd.train.export import ExportError
from iwopd.train.run import run_training
from iwopd.types import Prompt
from models import make_model, save_pair

PROMPTS = [Prompt(str(i), tuple(range(2, 4 + 3 * i))) for i in range(4)]
IDS = torch.arange(2, 20)[None]


def adapted(kind: str = "qwen3", **settings: Any) -> Any:
    """A model whose adapter does something."""
    model = make_model(kind).eval()
    model.name_or_path = "somewhere"
    add_adapter(model, **{"rank": 3, "alpha": 32.0, "targets": ["all-linear"], **settings})
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("path", ["auto", "model"])
def test_the_sampler_writes_with_the_adapter(kind: str, path: Any) -> None:
    """Its log-probs are those of the trainer, also on the lean path."""
    model = adapted(kind)
    assert (lean_obstacle(model) is None) == (kind != "gpt2")
    sampler = LocalSampler(model, SamplingSettings(20, stop_ids={1}), path=path)
    rollouts = sampler.sample(PROMPTS, seed=0, step=1)
    written = torch.cat([rollout.rollout_logprobs for rollout in rollouts])
    scored = torch.cat(LocalScorer(model).score(rollouts))
    torch.testing.assert_close(written, scored, atol=1e-4, rtol=0)
    with adapter_off(model):
        before = torch.cat(LocalScorer(model).score(rollouts))
    assert float((before - scored).abs().max()) > 0.1


def test_the_lean_path_leaves_what_it_cannot_read() -> None:
    model = adapted()
    with adapter_off(model):
        assert lean_obstacle(model) is not None
    assert lean_obstacle(model) is None
    other = make_model("qwen3")
    other.add_adapter(adapters._peft().LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    assert lean_obstacle(other) is not None


def test_an_adapter_in_a_large_model_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_model, "COPY_BYTES", 1000)
    assert "too large" in str(lean_obstacle(adapted()))


def test_head_and_packing_work_with_an_adapter() -> None:
    model = adapted()
    lm = ResponseModel(model)
    sequences = Sequences.build([torch.tensor(p.token_ids) for p in PROMPTS], [torch.arange(3, 9)] * len(PROMPTS))
    assert lm.packing_obstacle is None
    assert lm.check_head(sequences).difference < 1e-5
    assert lm.fused


def test_switched_off_it_is_the_model_before_and_waiting_gradients_stay() -> None:
    base, model = make_model("qwen3").eval(), adapted()
    loss = model(IDS).logits.square().mean()
    with adapter_off(model), torch.no_grad():
        assert torch.equal(model(IDS).logits, base(IDS).logits)
    loss.backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora" in name and grad is not None and float(grad.abs().max()) > 0 for name, grad in trained.items())
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_switched_off_twice_it_is_switched_on_once() -> None:
    base, model = make_model("qwen3").eval(), adapted()
    with torch.no_grad():
        with adapter_off(model):
            with adapter_off(model):
                pass
            assert torch.equal(model(IDS).logits, base(IDS).logits)
        assert not torch.equal(model(IDS).logits, base(IDS).logits)


def settings(folder: Path, **change: Any) -> dict[str, Any]:
    return {
        **save_pair(folder),
        "threads": torch.get_num_threads(),
        "lora": {"rank": 4, "alpha": 8.0},
        "method": {"advantage": "exopd", "weights": "cumulative-share", "kl_coef": 0.01},
        "optim": {"lr": 1e-2, "token_budget": 150},
        **change,
    }


def metrics(folder: Path) -> list[dict[str, Any]]:
    records = RunDirectory(folder).read("metrics.jsonl")
    return [{k: v for k, v in record.items() if not k.startswith(("time/", "throughput/"))} for record in records]


def tensors(folder: Path, step: int = 6) -> dict[str, torch.Tensor]:
    checkpoint = folder / "checkpoints" / f"step-{step:06d}"
    found = load_file(checkpoint / "model" / "adapter_model.safetensors")
    return {**found, **{f"optimizer/{k}": v for k, v in load_file(checkpoint / "optimizer.safetensors").items()}}


@pytest.fixture
def another_precision() -> Iterator[None]:
    """A process has one, which Accelerate keeps: forgotten before and after."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("another_precision")
@pytest.mark.parametrize("lora", [{"rank": 4, "alpha": 8.0}, {}])
def test_the_reference_runs_in_the_students_precision(tmp_path: Path, lora: dict[str, Any]) -> None:
    """The student has not moved: its log-probs are the reference's, also under autocast."""
    with assemble(make_config(settings(tmp_path, precision="bf16", lora=lora)), print) as parts:
        rollouts = parts.sampler.sample(parts.order.batch(1)[:4], seed=0, step=1)
        assert parts.reference_scorer is not None
        scores = (parts.student_scorer.score(rollouts), parts.reference_scorer.score(rollouts))
    torch.testing.assert_close(torch.cat(scores[0]), torch.cat(scores[1]), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of six steps: one in one go, one that was stopped after two."""
    folder = tmp_path_factory.mktemp("lora")
    given = settings(folder)
    run_training(make_config(given), folder / "whole")
    run_training(make_config({**given, "steps": 2}), folder / "stopped")
    run_training(make_config(given), folder / "stopped", resume=True)
    return folder


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(trained: Path) -> None:
    assert metrics(trained / "whole") == metrics(trained / "stopped")
    one, other = tensors(trained / "whole"), tensors(trained / "stopped")
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    kl = [record["kl/sampled"] for record in metrics(trained / "whole")]
    assert kl[-1] < kl[0]


def test_a_checkpoint_holds_the_adapter_alone(trained: Path) -> None:
    folder = trained / "whole" / "checkpoints" / "step-000006" / "model"
    names = load_file(folder / "adapter_model.safetensors").keys()
    assert len(names) == 2 * 2 * 7  # two matrices, two layers, seven projections
    assert all("lora_" in name for name in names)
    assert not (folder / "config.json").exists()  # or transformers would take it for a whole model


def test_a_reference_of_its_own_gives_the_same_run(trained: Path, tmp_path: Path) -> None:
    """The adapter switched off against a second copy of the student's first weights."""
    given = settings(trained)
    shutil.copytree(trained / "student", tmp_path / "reference")
    given["models"] = {**given["models"], "reference": str(tmp_path / "reference")}
    run_training(make_config(given), tmp_path / "run")
    for one, other in zip(metrics(trained / "whole"), metrics(tmp_path / "run"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["kl/sampled"] == pytest.approx(other["kl/sampled"], abs=1e-4)
    parts = assemble(make_config(settings(trained)), print)
    assert parts.reference_scorer is not None
    assert parts.reference_scorer.lm.model is parts.student  # type: ignore[attr-defined]


def test_adapter_and_merged_export_load_plainly(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for out, options in (("adapter", []), ("merged", ["--merge"])):
        with pytest.raises(SystemExit) as end:
            main(["export", str(trained / "whole"), str(tmp_path / out), *options])
        assert end.value.code == 0
    said = capsys.readouterr().out
    assert "adapter of step 6" in said
    assert "merged model of step 6" in said
    checkpoint = AutoModelForCausalLM.from_pretrained(trained / "whole" / "checkpoints" / "step-000006" / "model")
    adapter = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    before = AutoModelForCausalLM.from_pretrained(trained / "student")
    with torch.no_grad():
        expected = checkpoint(IDS).logits
        assert torch.equal(adapter(IDS).logits, expected)
        torch.testing.assert_close(merged(IDS).logits, expected, atol=1e-4, rtol=0)
        assert float((before(IDS).logits - expected).abs().max()) > 0.1
    assert not hasattr(merged, "peft_config")
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").eos_token == "<eos>"
    assert 'library_name: "peft"' in (tmp_path / "adapter" / "README.md").read_text()
    card = (tmp_path / "merged" / "README.md").read_text()
    assert 'library_name: "transformers"' in card
    assert "adapter:" not in card
    for folder in (tmp_path / "adapter", tmp_path / "merged"):
        assert (folder / "config.toml").read_text() == (trained / "whole" / "config.toml").read_text()
        assert len({file.stat().st_mode for file in folder.rglob("*") if file.is_file()}) == 1  # weights, too: by the umask


def test_a_whole_student_is_exported_too(trained: Path, tmp_path: Path) -> None:
    from iwopd.train.export import export

    run_training(make_config(settings(trained, lora={}, steps=2)), tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    assert export(checkpoint, tmp_path / "out") == "whole model of step 2"
    one, other = (AutoModelForCausalLM.from_pretrained(path) for path in (checkpoint / "model", tmp_path / "out"))
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())
    with pytest.raises(ExportError, match="is there already"):
        export(checkpoint, tmp_path / "out")


def test_an_adapter_goes_back_only_onto_its_own_weights(trained: Path, tmp_path: Path) -> None:
    given = settings(trained)
    shutil.copytree(trained / "whole", tmp_path / "run")
    shutil.copytree(trained / "student", tmp_path / "student")
    make_model("qwen3", seed=77).save_pretrained(tmp_path / "student")
    given["models"] = {**given["models"], "student": str(tmp_path / "student")}
    with pytest.raises(CheckpointError, match="other frozen weights"):
        run_training(make_config({**given, "steps": 8}), tmp_path / "run", resume=True, allow_changes=True)
    with pytest.raises(CheckpointError, match="holds an adapter, but a whole model is trained"):
        run_training(make_config(settings(trained, lora={}, steps=8)), tmp_path / "run", resume=True, allow_changes=True)


@pytest.mark.parametrize(
    ("targets", "words"), [(["lm_head"], "names the output matrix"), (["no_such_layer"], "does not fit a LlamaForCausalLM")]
)
def test_targets_that_cannot_be_trained_are_refused(targets: list[str], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        add_adapter(make_model("llama"), 2, 32.0, targets)


def test_gradient_checkpointing_and_half_precision(tmp_path: Path) -> None:
    given = settings(tmp_path, steps=2)
    run_training(make_config(given), tmp_path / "plain")
    optim = {**given["optim"], "gradient_checkpointing": True}
    run_training(make_config({**given, "optim": optim}), tmp_path / "recomputed")
    for one, other in zip(metrics(tmp_path / "plain"), metrics(tmp_path / "recomputed"), strict=True):
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    models = {**given["models"], "dtype": "bfloat16"}
    run_training(make_config({**given, "models": models}), tmp_path / "half")
    assert all(tensor.dtype == torch.float32 for tensor in tensors(tmp_path / "half", 2).values())


def test_the_fingerprint_is_that_of_the_frozen_weights() -> None:
    one, other = adapted(), adapted(rank=2)
    assert base_fingerprint(one) == base_fingerprint(other)
    with torch.no_grad():
        next(iter(other.parameters()))[0, 0] += 1
    assert base_fingerprint(one) != base_fingerprint(other)


def test_quantised_weights_need_a_package_that_is_named() -> None:
    """Bitsandbytes needs a GPU: nothing more of QLoRA can be run here."""
    with pytest.raises(ModelError, match=r"pip install 'iwopd\[qlora\]'"):
        quantization("4bit", "lora.quantize")
