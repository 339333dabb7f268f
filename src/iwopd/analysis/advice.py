"""`iwopd train --method auto`: a short probe of the configured pair chooses the method, before training.

    settings --probe_pair (256 prompts, no answers)--> agreement --advise--> settings with another [method] section

What it chooses between is of the recipe's family: OPD and survival, or their versions on whole distributions.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from iwopd.analysis.pair_probe import BATCHES, PROMPTS, probe_pair
from iwopd.analysis.prediction import FAMILIES, THRESHOLD, Family, Record, number
from iwopd.config import Config, make_config
from iwopd.errors import ConfigError
from iwopd.methods import METHODS, TITLES
from iwopd.models import load_tokenizer
from iwopd.tiny import PretrainingListener
from iwopd.train.loading import planned_world, source_of
from iwopd.train.tokenizers import foreign_tokenizers

REMEDY = "name a method in the recipe instead (`iwopd methods` lists them; `iwopd probe` helps to choose)"
LEAST_GAP = 1e-3
"""Nats a token: below this, gradients are rounding."""


class Advice(NamedTuple):
    """A method by its name in the catalogue, and why."""

    method: str
    words: str


def advise(probe: Record, family: Family = FAMILIES[0], threshold: float = THRESHOLD) -> Advice:
    """Uniform weights where the tokens after a drift surely pull where those before it do, else survival weights.

    Read off the probe's `agreement`; `agreement_interval` (low, high), if it is there, says how sure that is. In doubt it is
    survival, because the two mistakes do not cost the same: docs/results.md, "A probe that predicts".
    """
    agreement = number(probe.get("agreement"))
    if agreement is None:
        raise ValueError("the probe has no agreement of gradients: nothing can be recommended")
    low, high = (number(value) for value in probe.get("agreement_interval") or (None, None))
    told = "" if low is None or high is None else f" ({low:+.2f} to {high:+.2f})"
    open_ = low is not None and high is not None and low < threshold < high
    doubt = "; its interval leaves it open" if open_ else ""
    side = "below" if agreement < threshold else "at least"
    if agreement < threshold:
        method, why = family.survival, "do not pull where those before it do, so they are left to survival weights"
    elif open_:
        method, why = family.survival, "may not pull where those before it do, and survival weights lose less if that is wrong"
    else:
        method, why = family.plain, "pull where those before it do, so all tokens count alike"
    return Advice(
        method, f"agreement of gradients {agreement:+.2f}{told}, {side} {threshold:g}{doubt}: the tokens after a drift {why}"
    )


def advised(
    config: Config, say: Callable[[str], None], progress: PretrainingListener | None = None
) -> tuple[Config, dict[str, Any]]:
    """The settings with the method that a short probe recommends, and what `run.json` keeps of it."""
    check_advisable(config)
    say(f"--method auto: probing the pair on {BATCHES * PROMPTS} prompts")

    def advance(batch: int) -> None:
        if batch < BATCHES and batch % (BATCHES // 4) == 0:
            say(f"--method auto: {batch * PROMPTS} of {BATCHES * PROMPTS} prompts")

    probe = probe_pair(config, progress=progress, advance=advance)
    if probe.agreement.mean is None or probe.gap < LEAST_GAP:
        raise ConfigError(
            "--method auto: the agreement of gradients cannot be told, because student and teacher hardly differ on "
            f"these prompts ({probe.gap:.2g} nats a token): {REMEDY}"
        )
    advice = advise(probe.record, family_of(config))
    say(f"--method auto: {TITLES[advice.method]}: {advice.words}")
    kept = {"method": advice.method, "words": advice.words, "threshold": THRESHOLD, **probe.record}
    return with_method(config, advice.method), kept


def family_of(config: Config) -> Family:
    """That of the recipe's objective."""
    return FAMILIES[1] if config.method.made.needs_teacher_distribution else FAMILIES[0]


def with_method(config: Config, method: str) -> Config:
    """The same settings with the `[method]` section of a name of the catalogue."""
    return make_config({**config.model_dump(exclude_none=True), "method": METHODS[method]})


def check_advisable(config: Config) -> None:
    """Refuse what cannot be probed, before anything is loaded but tokenizers."""
    if config.teacher.has_servers:
        why = "it looks at gradients of whole distributions, and teacher servers (teacher.urls) do not give them"
    elif config.teacher.others:
        why = "it looks at whole distributions, and several teachers (teacher.others) have several output matrices"
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        why = f"it runs in one process, and there are {os.environ['WORLD_SIZE']}"
    elif config.reward.added:
        why = "it knows of no reward, and this recipe adds one (reward.coefficient)"
    elif _foreign(config):
        why = "the teacher has another tokenizer than the student, and distributions over other ids cannot be compared"
    else:
        return
    raise ConfigError(f"--method auto cannot probe this pair: {why}; {REMEDY}")


def _foreign(config: Config) -> bool:
    world = planned_world(config)
    if world is not None:
        return world.recipe.teacher.tokenizer != world.recipe.student.tokenizer
    student, teacher = source_of(config, "student", None), source_of(config, "teacher", None)
    assert student is not None  # the config was validated
    tokenizer = load_tokenizer(student, trust_remote_code=config.models.trust_remote_code)
    return bool(foreign_tokenizers(config, tokenizer, teacher))
