"""Supervised pretraining from scratch: next-token cross-entropy on the response tokens of worked solutions.

Every batch is fresh problems of one length, so with one token a character there is no padding; on a CPU that is more than
twice as fast as a padded batch. Pieces differ in number: shorter rows are padded on the right, where causal attention needs no
mask. `python -m iwopd.tiny` runs it in a separate process (`tiny/cache.py` starts it).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from iwopd.tiny import task
from iwopd.tiny.architecture import ModelRecipe, Stage, new_model
from iwopd.tiny.tokenizer import CHARACTERS, build_tokenizer

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

PretrainingListener = Callable[[str, int, int, float], None]
"""Called with (which model, step, steps in all, mean loss since the last call)."""
REPORT_EVERY = 10
IGNORED = -100
"""Target of what is not learnt: prompts and padding."""


def pretrain(recipe: ModelRecipe, progress: PretrainingListener | None = None) -> Qwen3ForCausalLM:
    """Train the model of a recipe. Deterministic for a given torch version and thread count."""
    model = new_model(recipe.size, recipe.seed, recipe.tokenizer)
    rng = random.Random(recipe.seed)
    done, told = 0, 0
    for stage in recipe.stages:
        losses: list[float] = []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
        for step, (ids, targets) in enumerate(training_batches(stage, rng, recipe.tokenizer)):
            for group in optimizer.param_groups:
                group["lr"] = stage.learning_rate_at(step)
            loss = solution_loss(model, ids, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                raise FloatingPointError(f"pretraining of {recipe.name!r} diverged: loss {losses[-1]} at step {done}")
            last = stage.is_far_enough(losses)
            if progress is not None and (done % REPORT_EVERY == 0 or done == recipe.steps or last):
                recent = losses[-(done - told) :]
                progress(recipe.name, done, recipe.steps, sum(recent) / len(recent))
                told = done
            if last:
                break
    model.train(False)
    return model


def solution_loss(model: Qwen3ForCausalLM, ids: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy [] of the last T tokens of `ids` [B, P + T], as far as `targets` [B, T] repeats them."""
    logits = model(input_ids=ids, use_cache=False).logits[:, -targets.shape[1] - 1 : -1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def training_batches(stage: Stage, rng: random.Random, tokenizer: str = CHARACTERS) -> Iterator[tuple[Tensor, Tensor]]:
    """The stage's batches: ids [B, P + T] of prompts and solutions, P of the shortest prompt, and targets [B, T]."""
    made: Any = build_tokenizer(tokenizer)
    streams = {n: task.problems(n, "train", rng) for n in (stage.operands, *(n for _, n in stage.shorter))}
    for step in range(stage.taken):
        operands = stage.operands_at(step)
        rows, targets = [], []
        for expression in islice(streams[operands], stage.batch):
            prompt = made.encode(expression + "?")
            solution = [*made.encode(_draw_solution(stage, expression, rng)), made.eos_token_id]
            rows.append(torch.tensor(prompt + solution))
            targets.append(torch.tensor([IGNORED] * len(prompt) + solution))
        answers = pad_sequence(targets, batch_first=True, padding_value=IGNORED)
        shortest = int((answers != IGNORED).any(0).int().argmax())
        yield pad_sequence(rows, batch_first=True, padding_value=made.pad_token_id), answers[:, shortest:]


def _draw_solution(stage: Stage, expression: str, rng: random.Random) -> str:
    if stage.unit == "line":
        return task.mixed_solution(expression, stage.right, rng, sure=stage.sure)
    return task.right_solution(expression) if rng.random() < stage.right else task.left_to_right_solution(expression)
