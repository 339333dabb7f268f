"""Models and tokenizers by local folder or hub id. Safetensors only; code of a repository only if asked for."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from iwopd.errors import UserError


class ModelError(UserError, ValueError):
    """A model or tokenizer that cannot be loaded or does not fit, with the reason."""


def load_model(
    source: str | Path, *, dtype: str = "float32", device: torch.device | str = "cpu", trust_remote_code: bool = False
) -> Any:
    """A causal LM, on its device, in the mode transformers leaves it in (eval)."""
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code, use_safetensors=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"cannot load a model from {source}: {_why(source, error)}") from None
    return model.to(device)


def load_tokenizer(source: str | Path, *, trust_remote_code: bool = False) -> Any:
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot load a tokenizer from {source}: {_why(source, error)}") from None


def stop_ids(tokenizer: Any, model: Any) -> frozenset[int]:
    """End-of-sequence ids of the tokenizer and of the model's generation config."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, (list, tuple)) else [configured]
    return frozenset(int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None)


def check_same_tokenizer(tokenizer: Any, other_source: str | Path, *, trust_remote_code: bool = False) -> None:
    """If the model at `other_source` brings a tokenizer, its ids must mean what the student's mean."""
    folder = Path(other_source)
    if folder.is_dir() and not [*folder.glob("*token*"), *folder.glob("vocab*")]:
        return  # it brings none, and transformers would make one up from the architecture
    try:
        other = load_tokenizer(other_source, trust_remote_code=trust_remote_code)
    except ModelError:
        return  # it brings none
    ours, theirs = ({i: token for token, i in t.get_vocab().items()} for t in (tokenizer, other))
    wrong = next((i for i, token in sorted(ours.items()) if theirs.get(i) != token), None)
    if wrong is not None:
        raise ModelError(
            f"id {wrong} is {ours[wrong]!r} for the student and {theirs.get(wrong)!r} for the teacher {other_source}: their "
            "tokenizers differ, so the teacher would score other texts than the student wrote; choose a pair of one family"
        )


def check_vocabulary(name: str, model: Any, tokenizer: Any) -> None:
    """The model called `name` must have a row of its output matrix for every id of the student's tokenizer."""
    rows = model.get_output_embeddings().weight.shape[0]
    if rows < len(tokenizer):
        raise ModelError(
            f"the student's tokenizer has {len(tokenizer)} ids, the {name}'s output matrix {rows} rows: both models must share "
            "the student's vocabulary"
        )


def weights_fingerprint(source: str | Path) -> str:
    """Tells whether a local folder still holds the same weights (names, sizes and times of its files); a hub id is itself."""
    folder = Path(source)
    if not folder.is_dir():
        return str(source)
    files = sorted(folder.glob("*.safetensors"))
    about = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(about).encode()).hexdigest()[:16]


def _why(source: str | Path, error: Exception) -> str:
    """For a path that does not exist, transformers complains about the form of a hub id."""
    is_path = str(source).startswith(("/", ".", "~")) or str(source).count("/") > 1
    return "there is no such folder" if is_path and not Path(source).exists() else str(error)
