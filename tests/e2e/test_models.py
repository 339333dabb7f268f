"""Models by folder, hub id and GGUF file, and what is refused when they are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from iwopd.config import ConfigError, make_config
from iwopd.models import ModelError, ModelSource, load_model, load_tokenizer
from iwopd.train.assembly import assemble
from iwopd.train.loading import reference_source, source_of
from iwopd.train.run import run_training
from iwopd.vocabulary import compare_vocabularies, token_bytes
from mismatched import healthy
from models import byte_tokenizer, make_model, save_byte_model, save_gguf, save_pair

IDS = torch.arange(5, 60)[None]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        values: torch.Tensor = model.eval()(IDS).logits.float()
    return values


@pytest.mark.parametrize("quantised", [False, True])
def test_a_gguf_file_is_the_model_that_was_written(tmp_path: Path, quantised: bool) -> None:
    original, _ = save_gguf(tmp_path, quantised=quantised)
    loaded = load_model(tmp_path / "tiny.gguf")
    for name, tensor in original.state_dict().items():
        error = float((tensor - loaded.state_dict()[name]).abs().max() / tensor.abs().max())
        assert error < (0.005 if quantised else 1e-6), name  # eight bits a weight
    assert torch.equal(logits(loaded), logits(load_model(ModelSource(str(tmp_path), "tiny.gguf"))))


def test_the_tokenizer_of_a_gguf_file_ends_where_the_file_says(tmp_path: Path) -> None:
    _, original = save_gguf(tmp_path)
    tokenizer = load_tokenizer(tmp_path / "tiny.gguf")
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token) == ("<eos>", "<bos>", "<pad>")
    assert tokenizer.chat_template == original.chat_template
    assert tokenizer.decode(tokenizer("hello you\n")["input_ids"]) == "hello you\n"
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    if theirs.eos_token == "<eos>":
        pytest.fail("transformers reads the end token of a GGUF file right by now: our correction can go")


def test_a_student_from_a_gguf_file_trains_and_its_checkpoint_is_a_plain_folder(tmp_path: Path) -> None:
    settings = healthy(tmp_path)
    save_gguf(tmp_path / "gguf", quantised=True)
    settings |= {
        "models": {
            "student": str(tmp_path / "gguf" / "tiny.gguf"),
            "teacher": str(tmp_path / "gguf"),
            "teacher_gguf_file": "tiny.gguf",
        }
    }
    config = make_config({**settings, "threads": torch.get_num_threads()})
    run_training(config, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step-000001" / "model"
    saved = AutoModelForCausalLM.from_pretrained(folder)
    before = load_model(tmp_path / "gguf" / "tiny.gguf")
    assert 0 < float((logits(saved) - logits(before)).abs().max()) < 0.1  # one step at 1e-5
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<eos>"
    card = (folder / "README.md").read_text()
    assert "| teacher | gguf/tiny.gguf |" in card
    assert "| method | OPD |" in card


def test_the_model_card_tells_where_the_weights_come_from(tmp_path: Path) -> None:
    settings = save_pair(tmp_path) | {"steps": 2, "threads": torch.get_num_threads()}
    run_training(make_config(settings), tmp_path / "run")
    card = (tmp_path / "run" / "checkpoints" / "step-000002" / "model" / "README.md").read_text()
    for words in (
        'library_name: "transformers"',
        "| teacher | teacher |",
        "| method | IW-OPD |",
        "after step 2 of 2",
        "lr = 0.001",
    ):
        assert words in card
    assert f"torch {torch.__version__}" in card
    assert str(tmp_path) not in card  # a card may be published


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{}/nowhere", "there is no such folder"),
        ("{}/student/none.gguf", "there is no such GGUF file"),
        ("{}/student", "lacks 11 weights of a Qwen3ForCausalLM, the first is model.layers.2"),
    ],
)
def test_what_cannot_be_loaded_says_why(tmp_path: Path, source: str, words: str) -> None:
    save_byte_model(tmp_path / "student")
    path = tmp_path / "student" / "config.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}))
    with pytest.raises(ModelError, match=words):
        load_model(source.format(tmp_path))


def test_sources_in_the_settings() -> None:
    models = {"student": "org/small", "teacher": "org/big-GGUF/q4.gguf", "teacher_revision": "abc123", "student_revision": "v1"}
    config = make_config({"models": models, "data": {"prompts": "p.jsonl"}})
    assert source_of(config, "student") == ModelSource("org/small", None, "v1")
    assert source_of(config, "teacher") == ModelSource("org/big-GGUF", "q4.gguf", "abc123")
    assert str(source_of(config, "teacher")) == "org/big-GGUF/q4.gguf@abc123"
    assert source_of(config, "reference") is None
    assert reference_source(config) is None
    with_reference = make_config({"models": models, "data": {"prompts": "p.jsonl"}, "method": {"advantage": "exopd"}})
    assert reference_source(with_reference) == ModelSource("org/small", None, "v1")
    adapter = make_config({**with_reference.model_dump(exclude_none=True), "lora": {"rank": 4}})
    assert reference_source(adapter) is None
    with pytest.raises(ConfigError, match="need models"):
        make_config({"models": {**models, "reference_revision": "x"}, "data": {"prompts": "p.jsonl"}})
    with pytest.raises(ConfigError, match="cannot be trained"):
        make_config({"models": models, "data": {"prompts": "p.jsonl"}, "lora": {"quantize": "4bit"}})


def test_teacher_and_student_are_loaded_as_asked(tmp_path: Path) -> None:
    settings = save_pair(tmp_path) | {"threads": torch.get_num_threads()}
    settings["models"] |= {"teacher_dtype": "float16", "attention": "eager", "teacher_device": "auto"}
    parts = assemble(make_config(settings), print)
    teacher = parts.teacher_scorer.lm.model  # type: ignore[attr-defined]
    assert (parts.student.dtype, teacher.dtype) == (torch.float32, torch.float16)
    assert parts.student.config._attn_implementation == "eager"
    rollouts = parts.sampler.sample(parts.order.batch(1)[:2], seed=0, step=1)
    assert all(torch.isfinite(values).all() for values in parts.teacher_scorer.score(rollouts))


def test_vocabularies_are_compared_by_bytes() -> None:
    ours, theirs = byte_tokenizer(), byte_tokenizer()
    table = token_bytes(ours)
    assert sorted(table[i] for i in range(2, 258)) == [bytes([i]) for i in range(256)]
    assert table[1] == b"<eos>"
    assert compare_vocabularies(ours, theirs).same
    theirs.add_tokens(["<more>"])
    assert (compare_vocabularies(ours, theirs).same, compare_vocabularies(ours, theirs).extra) == (True, 1)
    lacking = compare_vocabularies(theirs, ours)
    assert lacking.wrong == (258,)
    assert "nothing for the teacher" in lacking.example


def test_a_model_too_small_for_the_tokenizer_is_refused_without_the_doctor(tmp_path: Path) -> None:
    settings = save_pair(tmp_path) | {"threads": torch.get_num_threads()}
    make_model("qwen3", vocab=15).save_pretrained(tmp_path / "teacher")
    with pytest.raises(ModelError, match="the teacher's output matrix 15 rows"):
        assemble(make_config(settings), print)
