"""The prompts of one JSONL file, and the order of prompts: the same for every method and after every resume.

Schema of a line: `{"id": …, "prompt": … or "messages": […], "answer": …, "teacher": …}`; `id` defaults to the record's
number, `answer` and `teacher` may be absent. `prompt` becomes one user message. Other fields and sources: `data/sets.py`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from iwopd.data.chat import Chat
from iwopd.data.fields import DataError
from iwopd.data.sets import LoadedPrompts, PromptSet, load_set
from iwopd.types import Prompt

__all__ = ["DataError", "LoadedPrompts", "MixedOrder", "PromptOrder", "load_prompts"]


def load_prompts(path: Path, chat: Chat, max_tokens: int) -> LoadedPrompts:
    """Read a file and render it; over-long prompts are left out."""
    if not path.is_file():
        why = "it is a folder; name a JSONL file, or list it in data.sets" if path.is_dir() else "there is no such file"
        raise DataError(f"cannot read prompts from {path}: {why}")
    return load_set(PromptSet(str(path)), chat, max_tokens)


class PromptOrder:
    """Which prompts each step gets: every epoch in a shuffled order that depends on the seed and the epoch alone.

    A step never crosses the end of an epoch, so it holds no prompt twice; prompts that do not fill a last step are left for
    the next epoch's shuffle.
    """

    def __init__(self, prompts: Sequence[Prompt], per_step: int, seed: int, name: str = "") -> None:
        if len(prompts) < per_step:
            whose = f"{name!r} has" if name else "there are"
            lower = "rollout.prompts_per_step or the set's weight" if name else f"rollout.prompts_per_step to {len(prompts)}"
            raise DataError(
                f"{whose} {len(prompts)} training prompts, fewer than the {per_step} of one step: add prompts, or lower {lower}"
            )
        self.prompts = list(prompts)
        self.per_step, self.seed, self.name = per_step, seed, name

    @property
    def steps_per_epoch(self) -> int:
        return len(self.prompts) // self.per_step

    def batch(self, step: int) -> list[Prompt]:
        """The prompts of a step, counted from 1."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        order = list(range(len(self.prompts)))
        salt = f":{self.name}" if self.name else ""
        random.Random(f"order:{self.seed}:{epoch}{salt}").shuffle(order)
        return [self.prompts[row] for row in order[place * self.per_step : (place + 1) * self.per_step]]

    def some(self, step: int, count: int) -> list[Prompt]:
        """So many prompts for a step: the first of `batch`, then others of the set (all of them at most)."""
        usual = self.batch(step)
        if count <= len(usual):
            return usual[:count]
        there = {prompt.id for prompt in usual}
        others = [prompt for prompt in self.prompts if prompt.id not in there]
        salt = f":{self.name}" if self.name else ""
        random.Random(f"more:{self.seed}:{step}{salt}").shuffle(others)
        return usual + others[: count - len(usual)]

    def fingerprint(self) -> str:
        """Hash of all prompts in their given order: shows whether a resumed run has the same data."""
        return _hash((prompt.id, prompt.token_ids, *([prompt.teacher] if prompt.teacher else [])) for prompt in self.prompts)


class MixedOrder:
    """Several sets, each with its own order: every step has the same number of prompts of each.

    The step's prompts are split by weight (largest remainder). A set that runs out starts its next epoch, with a new shuffle,
    while larger ones are still in their first. As with `PromptOrder`, a batch is a function of seed and step.
    """

    def __init__(self, sets: Sequence[tuple[LoadedPrompts, float]], per_step: int, seed: int) -> None:
        counts = share_out(per_step, [weight for _, weight in sets])
        for (loaded, weight), count in zip(sets, counts, strict=True):
            if count == 0:
                raise DataError(
                    f"{loaded.name!r} has weight {weight:g} and so no prompt in a step of {per_step}: raise its weight or "
                    "rollout.prompts_per_step, or leave it out"
                )
        self.orders = [
            PromptOrder(loaded.prompts, count, seed, loaded.name) for (loaded, _), count in zip(sets, counts, strict=True)
        ]
        self.per_step, self.seed = per_step, seed

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts of all sets, concatenated."""
        return [prompt for order in self.orders for prompt in order.prompts]

    def batch(self, step: int) -> list[Prompt]:
        """The prompts of a step, counted from 1, all sets shuffled together."""
        prompts = [prompt for order in self.orders for prompt in order.batch(step)]
        random.Random(f"mix:{self.seed}:{step}").shuffle(prompts)
        return prompts

    def some(self, step: int, count: int) -> list[Prompt]:
        """So many prompts for a step, of each set its share."""
        shares = share_out(count, [order.per_step for order in self.orders])
        prompts = [prompt for order, share in zip(self.orders, shares, strict=True) for prompt in order.some(step, share)]
        random.Random(f"mix:{self.seed}:{step}").shuffle(prompts)
        return prompts

    def fingerprint(self) -> str:
        return _hash((order.name, order.per_step, order.fingerprint()) for order in self.orders)


def _hash(items: Iterable[tuple[Any, ...]]) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr(item).encode())
    return digest.hexdigest()[:16]


def share_out(total: int, weights: Sequence[float]) -> list[int]:
    """Integers in proportion to the weights that sum to the total; the first of equal remainders wins."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts
