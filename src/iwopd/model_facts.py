"""What models and tokenizers say about themselves: rows, context, padding."""

from __future__ import annotations

from typing import Any


def output_rows(model: Any) -> int:
    """Rows of the output matrix: ids that the model has a logit for, real or not."""
    return int(model.get_output_embeddings().weight.shape[0])


def pad_id(tokenizer: Any) -> int:
    """What fills the left of shorter prompts: the tokenizer's padding id, or 0."""
    return 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)


def text_config(config: Any) -> Any:
    """The config of the language model inside a model's config; both are the same where there is nothing but text."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def context_length(config: Any) -> int | None:
    """Tokens that a model of this config can see at once; None if it does not say."""
    most = getattr(text_config(config), "max_position_embeddings", None)
    return None if most is None else int(most)
