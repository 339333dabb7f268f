"""Pairs of models in folders that do not fit together, each in its own way: what the doctor must refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from models import byte_tokenizer, make_model, save_byte_model

PROMPTS = ["What is 2 + 2?", "Name a colour.", "Why is the sky blue?", "Count to three.", "Say hello.", "Spell cat."]


def healthy(folder: Path) -> dict[str, Any]:
    """Student and teacher that read and write bytes, and prompts for them; returns the settings."""
    for name, seed in (("student", 1), ("teacher", 2)):
        save_byte_model(folder / name, seed=seed)
        _set_stop(folder / name, 1)
    lines = [json.dumps({"id": f"p{number}", "prompt": text}) for number, text in enumerate(PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return {
        "steps": 1,
        "threads": 1,
        "models": {"student": str(folder / "student"), "teacher": str(folder / "teacher")},
        "data": {"prompts": str(folder / "prompts.jsonl")},
        "rollout": {"prompts_per_step": 4, "max_tokens": 12},
        "tracking": {"console": "plain"},
    }


SAME = {"tokenizer": "student"}
"""Without it, tokenizers that differ are aligned by text."""


def permuted_vocabulary(folder: Path, settings: dict[str, Any]) -> None:
    """The same size and the same tokens, two of them in each other's places."""
    settings["teacher"] = SAME
    path = folder / "teacher" / "tokenizer.json"
    state = json.loads(path.read_text())
    vocab = state["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(state))


def other_bytes_behind_the_same_strings(folder: Path, settings: dict[str, Any]) -> None:
    """Token strings agree, but the teacher's tokenizer writes text where the student's writes bytes: Ġ is not a space."""
    settings["teacher"] = SAME
    path = folder / "teacher" / "tokenizer.json"
    state = json.loads(path.read_text())
    state["decoder"] = {"type": "Fuse"}
    state["pre_tokenizer"] = {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps(state))


def smaller_vocabulary(folder: Path, settings: dict[str, Any]) -> None:
    """The student has special tokens that the teacher has not; its output matrix has rows for them all the same."""
    settings["teacher"] = SAME
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    tokenizer.save_pretrained(folder / "student")
    for name in ("student", "teacher"):
        _resize(folder / name, 300)


def too_few_rows(folder: Path, settings: dict[str, Any]) -> None:
    """The teacher brings no tokenizer, and its output matrix is too small for the student's."""
    for path in [*(folder / "teacher").glob("*token*"), *(folder / "teacher").glob("chat*")]:
        path.unlink()
    _resize(folder / "teacher", 200)


def answers_end_otherwise(folder: Path, settings: dict[str, Any]) -> None:
    """The chat template closes an answer with a token at which sampling does not stop."""
    for name in ("student", "teacher"):
        tokenizer = byte_tokenizer()
        tokenizer.add_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}"
        )
        tokenizer.save_pretrained(folder / name)
        _resize(folder / name, 264)
        _set_stop(folder / name, 1)


def teacher_ends_otherwise(folder: Path, settings: dict[str, Any]) -> None:
    """The teacher ends answers with another token than the student."""
    path = folder / "teacher" / "tokenizer_config.json"
    state = json.loads(path.read_text())
    state["eos_token"], state["pad_token"] = "<pad>", "<eos>"
    path.write_text(json.dumps(state))
    _set_stop(folder / "teacher", 0)


def no_end(folder: Path, settings: dict[str, Any]) -> None:
    """Nothing names an end-of-sequence token."""
    path = folder / "student" / "tokenizer_config.json"
    state = json.loads(path.read_text())
    del state["eos_token"]
    path.write_text(json.dumps(state))
    _set_stop(folder / "student", None)


def no_chat_template(folder: Path, settings: dict[str, Any]) -> None:
    for name in ("student", "teacher"):
        byte_tokenizer(chat=False).save_pretrained(folder / name)
        (folder / name / "chat_template.jinja").unlink(missing_ok=True)


def short_context(folder: Path, settings: dict[str, Any]) -> None:
    """The teacher has room for the prompt and the response, but not for the one token more."""
    longest = max(len(f"user: {text}\nassistant: ") for text in PROMPTS)
    _change_config(folder / "teacher", max_position_embeddings=longest + 12)


def missing_weights(folder: Path, settings: dict[str, Any]) -> None:
    """The teacher's config says three layers, its weights are of two."""
    _change_config(folder / "teacher", num_hidden_layers=3, layer_types=["full_attention"] * 3)


def not_there(folder: Path, settings: dict[str, Any]) -> None:
    settings["models"]["teacher"] = str(folder / "nowhere")


def no_prompts(folder: Path, settings: dict[str, Any]) -> None:
    (folder / "prompts.jsonl").write_text("\n")


def entropy_of_capped_logits(folder: Path, settings: dict[str, Any]) -> None:
    """The entropy bonus needs the fused head, which a student with capped logits does not fit."""
    make_model("gemma2", vocab=258).save_pretrained(folder / "student")
    settings["method"] = {"entropy_coef": 0.1}


MISMATCHES: list[tuple[Callable[[Path, dict[str, Any]], None], str, str]] = [
    (permuted_vocabulary, "is 'a' for the student and 'b' for the teacher", "choose a pair of one family"),
    (other_bytes_behind_the_same_strings, "for the student and", "choose a pair of one family"),
    (smaller_vocabulary, "'<think>' for the student and nothing for the teacher", "choose a pair of one family"),
    (too_few_rows, "258 ids, the teacher's output matrix 200 rows", "choose a pair of one family"),
    (answers_end_otherwise, "ends an answer with '<|im_end|>' (id 258)", "set rollout.stop_tokens = ['<|im_end|>']"),
    (teacher_ends_otherwise, "end with '<eos>' (id 1), the teacher's with '<pad>' (id 0)", "set rollout.stop_tokens"),
    (no_end, "names an end-of-sequence token", "set eos_token_id in generation_config.json"),
    (no_chat_template, "no chat template", "tokenizer.chat_template"),
    (short_context, "the teacher has room for", "lower rollout.max_tokens to 11"),
    (not_there, "there is no such folder", "correct models.teacher"),
    (no_prompts, "no usable prompts", "correct the data"),
    (entropy_of_capped_logits, "which the entropy bonus (method.entropy_coef) cannot use", "leave it out"),
]
"""What is wrong, words of the message, words of the remedy."""


def _resize(folder: Path, rows: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(rows, mean_resizing=False)
    tokenizer = AutoTokenizer.from_pretrained(folder) if (folder / "tokenizer.json").exists() else None
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _set_stop(folder: Path, stop: int | None) -> None:
    _change_config(folder, eos_token_id=stop)
    path = folder / "generation_config.json"
    state = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**state, "eos_token_id": stop}))


def _change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
