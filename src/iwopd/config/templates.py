"""Types of the settings of chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from iwopd.data.templates import read_template

RESERVED = (
    "messages",
    "conversation",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "processor_kwargs",
)
"""What rendering itself decides."""


def check_kwargs(given: Any) -> Any:
    """Refuse what a template cannot be given."""
    if not isinstance(given, Mapping):
        raise ValueError("must be a table of names and values, e.g. {enable_thinking = true}")
    if taken := [name for name in given if name in RESERVED]:
        raise ValueError(f"{taken[0]!r} is not a template's to receive: rendering decides it")
    if wrong := [name for name in given if not str(name).isidentifier()]:
        raise ValueError(f"{wrong[0]!r} is no name that a template could ask for")
    return given


TemplateText = Annotated[str, AfterValidator(read_template)]
"""A file with a Jinja template; once read, its text."""
TemplateKwargs = Annotated[dict[str, Any], BeforeValidator(check_kwargs)]
