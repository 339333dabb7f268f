"""Which tokens of a rollout are thinking, and which of its tokens teach (`rollout.truncated`, `rollout.thinking`).

Blocks are found in the bytes behind the ids, so a tag may be one token or several pieces, and a character may be split. A token
that holds any part of a block, tags included, belongs to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from iwopd.config import Config
from iwopd.data.chat import THINKING
from iwopd.data.thinking import thinking_spans
from iwopd.train.state import TrainingStoppedError
from iwopd.types import Rollout
from iwopd.vocabulary import token_bytes


class ThinkingTokens:
    """Finds the thinking blocks of rollouts."""

    def __init__(self, tokenizer: Any) -> None:
        self._bytes = token_bytes(tokenizer)

    @classmethod
    def of(cls, config: Config, tokenizer: Any) -> ThinkingTokens | None:
        """None: nobody asks."""
        asked = config.rollout.thinking != "keep" or bool(config.data.chat_template_kwargs.get(THINKING))
        return cls(tokenizer) if asked else None

    def mask(self, rollout: Rollout) -> Tensor:
        """[T] bool: the tokens of thinking blocks, one that the prompt opened included."""
        begun = rollout.prompt.begun.encode()
        pieces = [self._bytes.get(number, b"") for number in rollout.response_ids.tolist()]
        text = (begun + b"".join(pieces)).decode(errors="surrogateescape")
        ends = torch.tensor([len(piece) for piece in pieces], dtype=torch.long).cumsum(0) + len(begun)
        starts = torch.cat([torch.tensor([len(begun)]), ends[:-1]])[: len(pieces)]
        found = torch.zeros(len(pieces), dtype=torch.bool)
        spans = torch.tensor(_in_bytes(text, thinking_spans(text)), dtype=torch.long).view(-1, 2)
        begin = torch.searchsorted(ends, spans[:, 0].contiguous(), right=True)  # the first token that ends behind it
        end = torch.searchsorted(starts, spans[:, 1].contiguous())
        for one, other in zip(begin.tolist(), end.tolist(), strict=True):
            found[one:other] = True
        return found


def _in_bytes(text: str, spans: Iterable[tuple[int, int]]) -> list[int]:
    """Where spans of letters, one after the other, begin and end in bytes. Each letter is looked at once."""
    found, before, count = [], 0, 0
    for span in spans:
        for place in span:
            count += len(text[before:place].encode(errors="surrogateescape"))
            before = place
            found.append(count)
    return found


def teaching_tokens(config: Config, thinking: ThinkingTokens | None) -> Callable[[Rollout], Tensor] | None:
    """From an answer to its tokens that `rollout.thinking` lets teach, [T] bool; None: all."""
    choice = config.rollout.thinking
    if choice == "keep" or thinking is None:
        return None
    return lambda rollout: thinking.mask(rollout) if choice == "only" else ~thinking.mask(rollout)


def thinking_mask(config: Config, thinking: Sequence[Tensor] | None) -> Tensor | None:
    """[B, T] bool: the tokens that `rollout.thinking` lets teach; None: all. `thinking` [T] is the thinking of each rollout."""
    choice = config.rollout.thinking
    if choice == "keep" or thinking is None:
        return None
    return pad_sequence([row if choice == "only" else ~row for row in thinking], batch_first=True)


def teaching_mask(
    config: Config, thinking: Sequence[Tensor] | None, rollouts: Sequence[Rollout], *, needed: bool = True
) -> Tensor | None:
    """The same with `rollout.truncated`. Raises if nothing is left and something is `needed`: nobody else wrote answers."""
    mask, truncated = thinking_mask(config, thinking), config.rollout.truncated
    if truncated == "mask" or (truncated == "drop" and any(rollout.stop_reason == "length" for rollout in rollouts)):
        if mask is None:
            mask = pad_sequence([torch.ones(len(rollout), dtype=torch.bool) for rollout in rollouts], batch_first=True)
        mask = mask & torch.tensor([rollout.stop_reason != "length" for rollout in rollouts])[:, None]
    if needed and mask is not None and not mask.any():
        raise TrainingStoppedError(_nothing_left(config), exit_code=1)
    return mask


def _nothing_left(config: Config) -> str:
    why, remedy = {
        "keep": ("every rollout of the step was cut off or is empty", "Raise rollout.max_tokens, or keep them"),
        "mask": (
            "every rollout of the step is thinking to its last token, and rollout.thinking is 'mask'",
            "Raise rollout.max_tokens so that thinking comes to an end, or set rollout.thinking = 'keep'",
        ),
        "only": (
            "no rollout of the step has a thinking block, and rollout.thinking is 'only'",
            "Switch thinking on (data.chat_template_kwargs = {enable_thinking = true}), or set rollout.thinking = 'keep'",
        ),
    }[config.rollout.thinking]
    cut_off = f" (rollout.truncated = {config.rollout.truncated!r})" if config.rollout.truncated != "keep" else ""
    return f"{why}{cut_off}: nothing is left to train on. {remedy}"
