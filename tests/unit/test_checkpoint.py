"""Checkpoints: what goes in comes out bit for bit, damage is seen and set aside, and only old ones are deleted."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from iwopd.train import checkpoint, checkpoint_files
from iwopd.train.checkpoint import Checkpoint, CheckpointError, CheckpointStore
from iwopd.train.checkpoint_state import write_rng
from waiting import PATIENCE

VOCABULARY = 24
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def new(config: Any) -> Any:
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


def build(seed: int = 0, *, tied: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model in training mode, with dropout, so that every step draws random numbers."""
    torch.manual_seed(seed)
    return new(Qwen3Config(**SIZES, tie_word_embeddings=tied, attention_dropout=0.1)).to(dtype).train()


def build_optimizer(model: torch.nn.Module) -> Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.98), amsgrad=True)


def build_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers  # type: ignore[import-untyped]

    core = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="t0")  # type: ignore[no-untyped-call]


def train(model: Any, optimizer: Optimizer, steps: int) -> None:
    """Steps that draw from all three generators."""
    for _ in range(steps):
        ids = torch.randint(VOCABULARY, (2, 8))
        loss = model(input_ids=ids, labels=ids).loss * (1 + random.gauss(0, 0.1) + np.random.normal(0, 0.1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def tensors_of(model: torch.nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for index, entry in optimizer.state_dict()["state"].items():
        found |= {f"{index}.{key}": value.clone() for key, value in entry.items()}
    return found


def differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Names whose dtype or bits differ."""
    assert first.keys() == second.keys()
    return [
        name
        for name, tensor in first.items()
        if tensor.dtype != second[name].dtype
        or not torch.equal(tensor.contiguous().view(-1).view(torch.uint8), second[name].contiguous().view(-1).view(torch.uint8))
    ]


@pytest.fixture(autouse=True)
def _plain_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, and no oneDNN: virtual machines that announce AMX but forbid it die of its bfloat16 products."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, messages: list[str]) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", notify=messages.append)


def save(store: CheckpointStore, *steps: int, state: dict[str, Any] | None = None) -> Path:
    model = build()
    optimizer = build_optimizer(model)
    train(model, optimizer, 1)
    for step in steps:
        path = store.save(step, model=model, optimizer=optimizer, state={"step": step} if state is None else state)
    return path


def newest(store: CheckpointStore) -> Checkpoint:
    found = store.latest()
    assert found is not None
    return found


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir())


def flip(path: Path, offset: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if offset is None else offset] ^= 1
    path.write_bytes(data)


# --- bit for bit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tied", "dtype", "left_out"),
    [
        (True, torch.float32, "nothing"),
        (False, torch.float32, "nothing"),
        (True, torch.bfloat16, "nothing"),
        (True, torch.float32, "model"),
        (True, torch.float32, "optimizer"),
        (True, torch.float32, "rng"),
    ],
)
def test_resumed_steps_equal_uninterrupted_ones(store: CheckpointStore, tied: bool, dtype: torch.dtype, left_out: str) -> None:
    model = build(1, tied=tied, dtype=dtype)
    optimizer = build_optimizer(model)
    train(model, optimizer, 3)
    optimizer.param_groups[0]["lr"] = 3e-3
    store.save(3, model=model, optimizer=optimizer, state={})
    train(model, optimizer, 4)
    uninterrupted = tensors_of(model, optimizer)

    model = build(2, tied=tied, dtype=dtype)
    optimizer = build_optimizer(model)
    random.seed(0)
    np.random.seed(0)
    found = newest(store)
    if left_out != "model":
        found.load_model_weights(model)
    if left_out != "optimizer":
        found.load_optimizer(optimizer)
    if left_out != "rng":
        found.restore_rng()
    train(model, optimizer, 4)
    assert tied == (model.lm_head.weight is model.model.embed_tokens.weight)
    changed = differing(uninterrupted, tensors_of(model, optimizer))
    assert bool(changed) == (left_out != "nothing"), changed
    assert newest(store).step == 3  # training on what was loaded does not write through to the files


def test_saving_disturbs_nothing(store: CheckpointStore) -> None:
    results = []
    for saves in (False, True):
        model = build(1)
        optimizer = build_optimizer(model)
        random.seed(5)
        np.random.seed(5)
        for step in range(1, 4):
            train(model, optimizer, 1)
            if saves:
                store.save(step, model=model, tokenizer=build_tokenizer(), optimizer=optimizer, state={})
        results.append(tensors_of(model, optimizer))
    assert differing(*results) == []


def test_every_generator_comes_back(store: CheckpointStore) -> None:
    def draw() -> list[float]:
        return [*torch.randn(3).tolist(), random.gauss(0, 1), random.random(), *np.random.normal(size=3).tolist()]

    model = build()
    optimizer = build_optimizer(model)
    draw()  # leaves half a pair of normal numbers behind in Python and numpy
    store.save(1, model=model, optimizer=optimizer, state={})
    expected = draw()
    draw()
    newest(store).restore_rng()
    assert draw() == expected


def test_state_wider_than_its_parameter_keeps_its_dtype(store: CheckpointStore) -> None:
    model = build(dtype=torch.bfloat16)
    optimizer = build_optimizer(model)
    train(model, optimizer, 1)
    for entry in optimizer.state.values():
        entry["exp_avg"] = torch.randn(entry["exp_avg"].shape, dtype=torch.float32)
    before = tensors_of(model, optimizer)
    store.save(1, model=model, optimizer=optimizer, state={})
    fresh = build_optimizer(model)
    newest(store).load_optimizer(fresh)
    assert differing(before, tensors_of(model, fresh)) == []


def test_other_optimizers_and_odd_values(store: CheckpointStore) -> None:
    model = build()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 1)
    group = optimizer.param_groups[0]
    group |= {"initial_lr": 0.1, "tag": ("a", (1, None)), "rates": [1e-300, math.inf], "scale": torch.tensor(0.1)}
    first = next(iter(optimizer.state.values()))
    first["same"] = first["view"] = torch.arange(6.0)[2:4]  # shared memory, part of a larger storage
    first["transposed"] = torch.arange(6.0).reshape(2, 3).T
    store.save(1, model=model, optimizer=optimizer, state={})
    fresh = SGD(model.parameters(), lr=5.0)
    newest(store).load_optimizer(fresh)
    loaded = fresh.param_groups[0]
    assert {k: v for k, v in loaded.items() if k not in ("params", "scale")} == {
        k: v for k, v in group.items() if k not in ("params", "scale")
    }
    assert torch.equal(loaded["scale"], group["scale"])
    assert differing(tensors_of(model, optimizer), tensors_of(model, fresh)) == []


def test_an_optimizer_that_has_not_stepped(store: CheckpointStore) -> None:
    model = build()
    store.save(0, model=model, optimizer=build_optimizer(model), state={})
    fresh = build_optimizer(model)
    newest(store).load_optimizer(fresh)
    assert not fresh.state_dict()["state"]


def test_plain_transformers_loads_model_and_tokenizer(store: CheckpointStore, capfd: pytest.CaptureFixture[str]) -> None:
    model = build(tied=True, dtype=torch.bfloat16)
    store.save(7, model=model, tokenizer=build_tokenizer(), optimizer=build_optimizer(model), state={})
    assert capfd.readouterr() == ("", "")  # no progress bar
    found = newest(store)
    loaded = AutoModelForCausalLM.from_pretrained(found.model_path)
    assert differing(dict(model.state_dict()), dict(loaded.state_dict())) == []
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(found.model_path)
    assert tokenizer("t3 t5")["input_ids"] == [3, 5]


def test_a_model_whose_file_layout_differs_from_its_own(store: CheckpointStore) -> None:
    """By default transformers writes the experts of a mixture one by one; they must come back all the same."""
    config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)
    torch.manual_seed(0)
    model, other = new(config), new(config)
    store.save(1, model=model, optimizer=build_optimizer(model), state={})
    newest(store).load_model_weights(other)
    assert differing(dict(model.state_dict()), dict(other.state_dict())) == []
    loaded = AutoModelForCausalLM.from_pretrained(newest(store).model_path)
    assert differing(dict(model.state_dict()), dict(loaded.state_dict())) == []


def test_nothing_is_pickled(store: CheckpointStore) -> None:
    model = build()
    optimizer = build_optimizer(model)
    train(model, optimizer, 1)
    path = store.save(1, model=model, tokenizer=build_tokenizer(), optimizer=optimizer, state={"a": 1})
    files = [file for file in path.rglob("*") if file.is_file()]
    assert len(files) >= 9
    for file in files:
        assert file.suffix in (".json", ".safetensors", ".jinja"), file
        if file.suffix == ".json":
            json.loads(file.read_text())


# --- what does not fit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "live", "says"),
    [
        ({"tied": False}, {"tied": True}, "ties"),
        ({"tied": True}, {"tied": False}, "lacks 1 tensors"),
        ({}, {"dtype": torch.bfloat16}, "torch.float32 .* torch.bfloat16"),
    ],
)
def test_weights_of_another_model_are_refused(store: CheckpointStore, saved: Any, live: Any, says: str) -> None:
    model = build(**saved)
    store.save(1, model=model, optimizer=build_optimizer(model), state={})
    other = build(5, **live)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=says):
        newest(store).load_model_weights(other)
    assert differing(before, dict(other.state_dict())) == []


def test_weights_of_another_shape_are_refused(store: CheckpointStore) -> None:
    save(store, 1)
    wider = new(Qwen3Config(**{**SIZES, "intermediate_size": 40}, tie_word_embeddings=True))
    with pytest.raises(CheckpointError, match=r"mlp.* \[32, 16\] in .*\[40, 16\] in the model|\[16, 32\] in .*\[16, 40\]"):
        newest(store).load_model_weights(wider)
    deeper = new(Qwen3Config(**{**SIZES, "num_hidden_layers": 2}, tie_word_embeddings=True))
    with pytest.raises(CheckpointError, match=r"lacks 11 tensors of the model, the first is model\.layers\.1"):
        newest(store).load_model_weights(deeper)


def test_another_optimizer_is_refused(store: CheckpointStore) -> None:
    save(store, 1)
    model = build()
    parameters = list(model.parameters())
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters if parameter.dim() == 1]
    found = newest(store)
    with pytest.raises(CheckpointError, match="state of AdamW, the optimizer is SGD"):
        found.load_optimizer(SGD(parameters, lr=0.1))
    with pytest.raises(CheckpointError, match="2 parameter groups, the optimizer has 1"):
        found.load_optimizer(AdamW(parameters))
    with pytest.raises(CheckpointError, match=r"parameter group 1 has 5 parameters in .*, 4 in the optimizer"):
        found.load_optimizer(AdamW([{"params": matrices}, {"params": vectors[:-1]}]))
    with pytest.raises(
        CheckpointError, match=r"parameter 0 of group 0 has shape \[24, 16\] in .*, \[16, 32\] in the optimizer"
    ):
        found.load_optimizer(AdamW([{"params": matrices[::-1]}, {"params": vectors}]))


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"a": {"b": [1, torch.ones(1)]}}, r"state\['a'\]\['b'\]\[1\] is a Tensor"),
        ({"a": {3: 1}}, r"state\['a'\] has the key 3"),
        ({"a": Path("x")}, r"state\['a'\] is a \w*Path"),
    ],
)
def test_state_that_json_cannot_hold_is_refused_before_anything_is_written(
    store: CheckpointStore, state: Any, says: str
) -> None:
    with pytest.raises(TypeError, match=says):
        save(store, 1, state=state)
    assert not store.directory.exists()


def test_state_comes_back(store: CheckpointStore) -> None:
    state = {"a": 0.1 + 0.2, "b": [1, None, True, "é\ud800"], "big": 2**80, "worst": -math.inf, "t": (1, 2)}
    save(store, 1, state=state)
    assert newest(store).state == {**state, "t": [1, 2]}


def test_a_wrapped_model_is_refused(store: CheckpointStore) -> None:
    model = build()
    with pytest.raises(TypeError, match="Sequential without save_pretrained: unwrap it"):
        store.save(1, model=torch.nn.Sequential(model), optimizer=build_optimizer(model), state={})


def test_a_model_that_writes_only_part_of_itself_is_refused_at_once(store: CheckpointStore) -> None:
    model = build()
    model._keys_to_ignore_on_save = {"model.norm.weight"}
    with pytest.raises(CheckpointError, match=r"what save_pretrained wrote lacks 1 tensors .* model\.norm\.weight"):
        store.save(1, model=model, optimizer=build_optimizer(model), state={})
    assert names(store) == []


# --- damage ---------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


FILES = (
    "model/model.safetensors",
    "model/config.json",
    "model/generation_config.json",
    "optimizer.safetensors",
    "optimizer.json",
    "rng.safetensors",
    "rng.json",
    "state.json",
)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    ("harm", "says"),
    [(flip, "has SHA-256"), (truncate, r"bytes, the manifest says"), (Path.unlink, "is missing")],
    ids=["flipped", "truncated", "missing"],
)
def test_damage_to_any_file_is_seen(
    store: CheckpointStore, messages: list[str], file: str, harm: Callable[[Path], None], says: str
) -> None:
    save(store, 10, 20)
    harm(store.directory / "step-000020" / file)
    left = sorted(path.name for path in (store.directory / "step-000020").rglob("*"))
    assert newest(store).step == 10
    assert names(store) == ["damaged-step-000020", "step-000010"]
    assert sorted(path.name for path in (store.directory / "damaged-step-000020").rglob("*")) == left
    (message,) = messages
    assert f"{store.directory / 'step-000020'} is damaged: {file} " in message
    assert says in message
    assert "moved to damaged-step-000020" in message
    assert newest(store).step == 10
    assert len(messages) == 1


def test_the_files_that_are_damaged_above_are_all_there_are(store: CheckpointStore) -> None:
    path = save(store, 1)
    assert json.loads((path / "manifest.json").read_text())["files"].keys() == set(FILES)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "manifest.json is missing"),
        ("", "manifest.json cannot be read"),
        ("[]", "manifest.json cannot be read"),
        ('{"version": 1, "step": 20, "files": {}}', "manifest.json does not list model/config.json"),
        ('{"version": 1, "step": 10, "files": {}}', "step 10, not of format 1 and step 20"),
        ('{"version": 0, "step": 20, "files": {}}', "of format 0"),
        ('{"version": 1, "step": 20, "files": {"a": {"size": "x", "sha256": ""}}}', "manifest.json cannot be read"),
    ],
)
def test_a_manifest_that_cannot_be_used(store: CheckpointStore, messages: list[str], text: str | None, says: str) -> None:
    manifest = save(store, 10, 20) / "manifest.json"
    if text is None:
        manifest.unlink()
    else:
        manifest.write_text(text)
    assert newest(store).step == 10
    assert says in messages[0]


def test_a_manifest_cannot_point_outside(store: CheckpointStore, messages: list[str]) -> None:
    manifest = save(store, 10, 20) / "manifest.json"
    values = json.loads(manifest.read_text())
    values["files"]["../step-000010/state.json"] = values["files"]["state.json"]
    manifest.write_text(json.dumps(values))
    assert newest(store).step == 10
    assert "outside the checkpoint" in messages[0]


def test_a_newer_format_is_refused_and_left_where_it_is(store: CheckpointStore) -> None:
    manifest = save(store, 10, 20) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(CheckpointError, match="has format 2, this version of iwopd reads up to 1: update iwopd"):
        store.latest()
    assert names(store) == ["step-000010", "step-000020"]


@pytest.mark.parametrize(
    "name", ["model/zz.safetensors", "model/.zz.safetensors", "model/adapter_config.json", "model/code.py", "optimizer-2.json"]
)
def test_files_beside_the_manifest_are_refused(store: CheckpointStore, messages: list[str], name: str) -> None:
    save(store, 1, 2)
    folder = store.directory / "step-000002"
    (folder / "model" / ".DS_Store").write_text("a file manager's")
    assert newest(store).step == 2
    stranger = folder / name
    stranger.write_bytes(next((folder / "model").glob("model*.safetensors")).read_bytes())
    for read in (store.latest, lambda: store.open(2)):
        with pytest.raises(CheckpointError, match=rf"holds {name}, which its manifest.json does not list.*Move it elsewhere"):
            read()
    stranger.unlink()
    assert newest(store).step == 2  # it was never set aside
    assert messages == []


def test_a_weight_that_two_files_hold_is_refused(store: CheckpointStore) -> None:
    save(store, 1)
    checkpoint = newest(store)
    (weights,) = checkpoint.model_path.glob("*.safetensors")
    (checkpoint.model_path / "zz.safetensors").write_bytes(weights.read_bytes())
    with pytest.raises(CheckpointError, match=r"zz.safetensors holds .*, which another file in .* holds, too"):
        checkpoint.load_model_weights(torch.nn.Linear(1, 1))


def test_several_damaged_ones_are_all_kept(store: CheckpointStore, messages: list[str]) -> None:
    for _ in range(3):
        flip(save(store, 20) / "state.json", 2)
        assert store.latest() is None
    assert names(store) == ["damaged-step-000020", "damaged-step-000020-2", "damaged-step-000020-3"]
    assert len(messages) == 3


def test_a_file_in_place_of_a_checkpoint(store: CheckpointStore, messages: list[str]) -> None:
    save(store, 10)
    (store.directory / "step-000020").write_text("not a folder")
    assert newest(store).step == 10
    assert "manifest.json cannot be read (NotADirectoryError" in messages[0]


def test_saving_onto_a_damaged_checkpoint_sets_it_aside(store: CheckpointStore, messages: list[str]) -> None:
    truncate(save(store, 10) / "rng.json")
    save(store, 10, state={"second": True})
    assert newest(store).state == {"second": True}
    assert names(store) == ["damaged-step-000010", "step-000010"]
    assert len(messages) == 1


def test_saving_onto_a_valid_checkpoint_replaces_it(store: CheckpointStore, messages: list[str]) -> None:
    save(store, 10, state={"first": True})
    save(store, 10, state={"second": True})
    assert newest(store).state == {"second": True}
    assert names(store) == ["step-000010"]
    assert messages == []


def test_opening_one_by_step_or_name(store: CheckpointStore) -> None:
    save(store, 10, 20)
    assert store.open(10).step == store.open("step-000010").step == 10
    flip(store.directory / "step-000010/model/model.safetensors")
    with pytest.raises(CheckpointError, match=r"damaged: model/model\.safetensors has SHA-256"):
        store.open(10)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 30: .* has steps \[10, 20\]"):
        store.open(30)
    with pytest.raises(ValueError, match="'best' is not a checkpoint"):
        store.open("best")


def test_an_empty_or_absent_directory_has_no_checkpoint(store: CheckpointStore) -> None:
    assert store.latest() is None
    assert not store.directory.exists()
    store.directory.mkdir()
    assert store.latest() is None


# --- retention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    store = CheckpointStore(tmp_path, keep=keep)
    seen = []
    for step in (9, 10, 100, 999_999, 1_000_000):  # by number, not by name
        save(store, step)
        seen.append(step)
        assert store.steps() == seen[-keep:]
    assert newest(store).step == 1_000_000
    assert not [name for name in names(store) if not name.startswith("step-")]


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        CheckpointStore(tmp_path, keep=0)


def test_protected_ones_stay_until_they_are_no_longer(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 1, 2)
    store.protect(1)
    store.protect("step-000002")
    save(CheckpointStore(store.directory), 3, 4, 5)  # another store knows of it
    assert store.steps() == [1, 2, 4, 5]
    store.unprotect(1)
    assert store.protected() == {2}
    assert store.steps() == [1, 2, 4, 5]
    save(store, 6)
    assert store.steps() == [2, 5, 6]
    with pytest.raises(CheckpointError, match=r"cannot protect step 1: .* steps \[2, 5, 6\]"):
        store.protect(1)
    assert json.loads((store.directory / "protected.json").read_text()) == {"steps": [2]}
    assert CheckpointStore(tmp_path / "absent").protected() == frozenset()


def test_a_list_of_protected_ones_that_cannot_be_written_stays_as_it_was(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 1, 2)
    store.protect(1)

    def refuse(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(CheckpointError, match=r"cannot write .*protected\.json: .*Input/output error"):
        store.protect(2)
    assert store.protected() == {1}
    assert names(store) == ["protected.json", "step-000001", "step-000002"]


def test_nothing_is_deleted_while_the_list_of_protected_ones_cannot_be_read(
    store: CheckpointStore, messages: list[str]
) -> None:
    save(store, 1, 2)
    (store.directory / "protected.json").write_text("{")
    save(store, 3)
    assert store.steps() == [1, 2, 3]
    assert "not all deleted" in messages[0]
    assert "protected.json cannot be read" in messages[0]
    with pytest.raises(CheckpointError, match="repair or delete it"):
        store.protect(3)


def test_a_damaged_one_does_not_count(store: CheckpointStore, messages: list[str]) -> None:
    save(store, 1, 2)
    flip(store.directory / "step-000002/optimizer.safetensors")
    save(store, 3)
    assert names(store) == ["damaged-step-000002", "step-000001", "step-000003"]
    assert "optimizer.safetensors has SHA-256" in messages[0]


def test_later_steps_are_left_alone(store: CheckpointStore) -> None:
    """A run that was taken up again from an older checkpoint must not lose what it saves, nor what it may go back to."""
    save(store, 10, 20)
    for step in (3, 4, 5):
        save(store, step)
    assert store.steps() == [4, 5, 10, 20]


def test_the_old_one_goes_only_when_the_new_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    deleted = []

    def delete(self: CheckpointStore, path: Path) -> None:
        deleted.append(path.name)
        assert checkpoint_files.damage(self.directory / "step-000002", 2) is None

    monkeypatch.setattr(CheckpointStore, "_delete", delete)
    save(store, 2)
    assert deleted == ["step-000001"]


def test_a_save_does_not_fail_because_an_old_one_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    store = CheckpointStore(tmp_path, keep=1, notify=messages.append)
    save(store, 1)

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint, "remove", refuse)
    save(store, 2)
    assert newest(store).step == 2
    assert "Delete it by hand" in messages[0]
    monkeypatch.undo()
    assert newest(store).step == 2
    assert names(store) == ["step-000002"]  # the next look finished the job


# --- unfinished work ------------------------------------------------------------------------------------------------


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("visit", ["open", "latest", "save"])
def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(store: CheckpointStore, visit: str) -> None:
    save(store, 1)
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        living = [f".tmp-step-000002-{sleeper.pid}", f".tmp-step-000003-{sleeper.pid}-2"]
        dead = [f".tmp-step-000002-{dead_pid()}", f".tmp-step-000002-{os.getpid()}", f".tmp-deleted-step-000002-{dead_pid()}-2"]
        others = [".tmp-of-somebody-else", "notes"]
        for name in [*living, *dead, *others]:
            (store.directory / name / "model").mkdir(parents=True)
            (store.directory / name / "model/half").write_text("a")
        (store.directory / f".tmp-protected.json-{sleeper.pid}").write_text("{")  # its writer would hold the lock
        if visit == "open":
            CheckpointStore(store.directory)
        elif visit == "latest":
            assert newest(store).step == 1
        else:
            save(store, 1)
        assert set(names(store)) == {*living, *others, "step-000001"}
    finally:
        sleeper.communicate(b"\n")


@pytest.mark.parametrize("pid_taken", [False, True])
def test_a_replacement_cut_short_is_undone(store: CheckpointStore, pid_taken: bool) -> None:
    """Also when the dead process's id has gone to another one."""
    path = save(store, 5, state={"old": True})
    aside = path.with_name(f".tmp-replaced-step-000005-{os.getppid() if pid_taken else dead_pid()}")
    path.rename(aside)
    assert newest(store).state == {"old": True}
    save(store, 5, state={"new": True})
    (store.directory / aside.name).mkdir()
    assert newest(store).state == {"new": True}
    assert names(store) == ["step-000005"]


def test_another_thread_does_not_clear_a_save_under_way(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 1)
    started, go_on = threading.Event(), threading.Event()

    def pause(draft: Path) -> None:
        started.set()
        assert go_on.wait(PATIENCE)
        write_rng(draft)

    monkeypatch.setattr(checkpoint, "write_rng", pause)
    thread = threading.Thread(target=save, args=(store, 2))
    thread.start()
    try:
        assert started.wait(PATIENCE)
        assert newest(CheckpointStore(store.directory)).step == 1
        assert f".tmp-step-000002-{os.getpid()}" in names(store)
    finally:
        go_on.set()
        thread.join()
    assert newest(store).step == 2
    assert names(store) == ["step-000001", "step-000002"]


class BrokenTokenizer:
    """Fails in the middle of a save."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("half")
        raise self.error


@pytest.mark.parametrize(
    ("error", "raised", "says"),
    [
        (ValueError("odd"), ValueError, "odd"),
        (KeyboardInterrupt("now"), KeyboardInterrupt, "now"),
        (OSError(errno.ENOSPC, "No space left on device"), CheckpointError, "No space left on device.*free some space"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), CheckpointError, "quota"),
        (Exception("No space left on device (os error 28)"), CheckpointError, "No space left on device.*free some space"),
        (OSError("the library's own words"), CheckpointError, "the library's own words"),
    ],
)
def test_a_save_that_fails_leaves_all_as_it_was(store: CheckpointStore, error: Any, raised: Any, says: str) -> None:
    save(store, 1)
    model = build()
    for step in (1, 2):
        with pytest.raises(raised, match=says) as caught:
            store.save(step, model=model, tokenizer=BrokenTokenizer(error), optimizer=build_optimizer(model), state={})
        if raised is CheckpointError:
            text = str(caught.value)
            assert f"step {step} in {store.directory}" in text
            assert f"{sum(parameter.nbytes for parameter in model.parameters()):,} bytes" in text
            assert "are free" in text
        assert names(store) == ["step-000001"]
        assert newest(store).state == {"step": 1}


def test_a_replacement_that_fails_puts_the_old_one_back(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 1, state={"old": True})
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name.startswith(".tmp-step") and target.name == "step-000001":
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(store, 1, state={"new": True})
    assert names(store) == ["step-000001"]
    assert newest(store).state == {"old": True}


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="asks /proc which file a descriptor is")
def test_all_is_on_the_disk_before_the_rename_and_the_rename_after_it(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, Path]] = []
    fsync, rename = os.fsync, Path.rename

    def sync(descriptor: int) -> None:
        events.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def move(self: Path, target: Path) -> Path:
        events.append(("rename", target))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", move)
    path = save(store, 1)
    turn = events.index(("rename", path))
    before = [file for kind, file in events[:turn] if kind == "sync" and ".tmp-" in str(file)]
    draft = before[-1]
    assert {file.relative_to(draft) for file in before} == {file.relative_to(path) for file in [path, *path.rglob("*")]}
    written = [str(file.relative_to(draft)) for file in before]
    assert written[-3:] == ["manifest.json", "model", "."]
    assert events[turn + 1 :] == [("sync", store.directory)]


def test_two_stores_on_one_directory(tmp_path: Path, messages: list[str]) -> None:
    """Different steps and the same one at the same time: every save succeeds, nothing is lost or left over."""
    errors: list[BaseException] = []

    def work(steps: Sequence[int]) -> None:
        try:
            store = CheckpointStore(tmp_path, keep=3, notify=messages.append)
            for step in steps:
                save(store, step)
                assert newest(store).step >= step
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(steps,)) for steps in ([2, 4, 5, 7, 8], [1, 3, 5, 6, 8])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert messages == []
    store = CheckpointStore(tmp_path)
    assert store.steps()[-1] == 8
    assert all(store.open(step).state == {"step": step} for step in store.steps())
    assert len(store.steps()) >= 3
    assert all(name.startswith("step-") for name in names(store))
