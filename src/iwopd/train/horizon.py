"""What must hold between a horizon and the longest answer, which an embedded world may decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from iwopd import tiny
from iwopd.config import Config, ConfigError
from iwopd.lm import TOLERANCE, TOLERANCE_HALF
from iwopd.rollout.horizons import Drift
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.scorer import Scorer
from iwopd.train.loading import world_recipe
from iwopd.train.refusals import Refused
from iwopd.types import Piece, Prompt, Rollout, StepStats

MOST_STOPPED, SHORT = 0.95, 1.25
"""Share of answers, and their mean length in first blocks, from which nearly everything stops at once."""
TRIED = 24
"""Tokens on which a teacher that follows answers is compared with itself."""


def longest_answer(config: Config) -> int | None:
    """Most tokens of an answer; None if nobody says."""
    recipe = world_recipe(config)
    return config.rollout.max_tokens or (None if recipe is None else tiny.max_response_tokens(recipe.operands))


def horizon_refuses(config: Config) -> Iterator[Refused]:
    """A horizon beyond the longest answer, or too small for one prompt: before anything is loaded."""
    limit = longest_answer(config)
    if limit is None:
        return
    try:
        config.rollout.horizon.made.check(limit, config.rollout.samples)
    except ValueError as error:
        what, _, remedy = str(error).rpartition(": ")
        yield Refused(f"rollout.horizon: {what}", remedy)


def stops_at_once(config: Config, stats: StepStats) -> str | None:
    """What to say of a step in which nearly every answer stopped at its first look."""
    horizon, found = config.rollout.horizon.made, stats.metrics
    if not isinstance(horizon, Drift) or not found["rollout/stopped"] >= MOST_STOPPED:
        return None
    if found["rollout/length_mean"] > SHORT * horizon.next_look(0):
        return None
    return (
        f"{found['rollout/stopped']:.0%} of the answers stopped, after {found['rollout/length_mean']:.0f} tokens on average: "
        f"rollout.horizon.threshold = {horizon.threshold:g} may be too high for this pair. `iwopd probe` proposes one "
        "(docs/horizons.md)"
    )


def times_read(horizon: Drift, prompt: int, answer: int) -> float:
    """How often a teacher reads the tokens of an answer that is not stopped, if it reads all of them again at every look."""
    read, look = prompt + answer, horizon.next_look(0)
    while look < answer:
        read += prompt + look
        look = horizon.next_look(look)
    return read / (prompt + answer)


def check_following(config: Config, teacher: Scorer, prompts: Sequence[Prompt]) -> None:
    """Refuse a local teacher whose scores of an answer in pieces are not those of the whole answer."""
    if not config.rollout.horizon.made.stops_online:
        return
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids)).token_ids
    ids = torch.tensor((longest * TRIED)[: TRIED + 1])
    rollout = Rollout(Prompt("trial", tuple(ids[:1].tolist())), ids[1:], torch.zeros(TRIED), "length")
    for name, scorer in teacher.local("teacher").items():
        if not isinstance(scorer, LocalScorer):
            continue
        try:
            found = float((_in_pieces(scorer, rollout) - scorer.score([rollout])[0]).abs().max())
            why = "" if found <= (TOLERANCE_HALF if scorer.half else TOLERANCE) else f"their log-probs differ by {found:.2g}"
        except Exception as error:  # whatever it is, this model's cache is not one that can be continued
            why = f"{type(error).__name__}: {error}"
        if why:
            raise ConfigError(
                f"rollout.horizon.type is {config.rollout.horizon.type!r}, but the {name} (a {type(scorer.lm.model).__name__}) "
                f"cannot score answers piece by piece ({why}): choose the horizon 'fixed' or 'growing'"
            )


def _in_pieces(scorer: LocalScorer, rollout: Rollout) -> Tensor:
    follower, found, start = scorer.follow(), [], 0
    for size in (1, 7, TRIED - 8):
        piece = slice(start, start + size)
        found += follower.read([Piece(0, rollout.prompt, rollout.response_ids[piece], rollout.rollout_logprobs[piece])])
        start += size
    return torch.cat([one.logprobs for one in found])
