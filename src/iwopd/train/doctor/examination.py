"""All checks in their order: first what needs no weights, then the models at work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from iwopd.config import Config
from iwopd.errors import UserError
from iwopd.train.attention import flash_refuses
from iwopd.train.doctor.asked import Asked
from iwopd.train.doctor.case import Case, open_case
from iwopd.train.doctor.chat import check_rendering, check_template
from iwopd.train.doctor.data import check_contamination, check_data
from iwopd.train.doctor.findings import Finding, failure
from iwopd.train.doctor.identity import check_files, check_rows, check_special_tokens, check_vocabularies
from iwopd.train.doctor.lengths import check_context, check_horizon, check_rope, check_temperature
from iwopd.train.doctor.machine import check_packages, check_processor, check_ranks
from iwopd.train.doctor.noise import check_noise
from iwopd.train.doctor.resources import check_resources
from iwopd.train.doctor.tokenizers import check_spans, check_written_spans
from iwopd.train.doctor.working import (
    SEQUENCES,
    check_masks,
    check_sampler,
    check_scorers,
    head_findings,
    known_rollouts,
    local_models,
)
from iwopd.train.horizon import horizon_refuses
from iwopd.train.parts import Parts
from iwopd.train.ranks import Launched, launched
from iwopd.train.reward import reward_refuses

Say = Callable[[str], None]
"""Hears what begins, if it may take a while."""


def examine_recipe(
    config: Config, folder: Path, *, static: bool = False, ranks: int | None = None, say: Say = lambda _: None
) -> Iterator[Finding]:
    """What can be said without weights; `folder` is the run directory.

    static: no model is loaded on this machine. ranks: processes that will train, on one machine; by default those that were
    launched.
    """
    started = launched() if ranks is None else Launched(ranks, ranks)
    packages = [*check_packages(config)]
    yield from packages
    yield from check_ranks(config, started)
    yield from (failure("horizon", *refused) for refused in horizon_refuses(config))
    if not static:
        yield from (failure("attention", *refused) for refused in flash_refuses(config))
        yield from (failure("reward", *refused) for refused in reward_refuses(config))
        yield from check_processor(config)
    case = open_case(config, folder, say)
    yield from check_files(case, loaded=not static)
    if not static and any(member.problem and not member.elsewhere for member in case.members.values()):
        return  # nothing that could be said of the rest would be about this run
    checks = (check_vocabularies, check_special_tokens, check_rows, check_template, check_temperature, check_data)
    for check in (*checks, check_rendering, check_spans, check_horizon):
        yield from check(case)
    configs = {member.name: member.config for member in case.members.values() if member.config is not None}
    if configs and not case.data_problem:
        yield from check_context(case, configs)
        yield from check_rope(case, configs)
        try:
            yield from check_resources(case, ranks=started)
        except UserError as error:  # an adapter that does not fit the model, or one without its package, which is said already
            if all(finding.level != "fail" for finding in packages):
                yield failure("memory", str(error), "correct it")


def examine_models(
    config: Config, parts: Parts, folder: Path, *, step: int = 1, say: Say = lambda _: None
) -> Iterator[Finding]:
    """What needs the weights, and whoever scores at work."""
    if config.models.world is not None:  # whose configs came with the models
        case, models = Case(config, {}, parts.max_response, folder, parts.order.prompts), local_models(parts)
        yield from check_context(case, {name: model.config for name, model in models.items()})
        yield from check_resources(case, models)
    yield from check_contamination(parts.order.prompts, {task.name: task.prompts for task in parts.tasks})
    yield from check_masks(parts)
    say("the student writes a few tokens")
    rollouts = known_rollouts(config, parts, step)
    yield from check_written_spans(parts, rollouts)
    yield from head_findings(parts)
    asked, sound = Asked(parts, config.rollout.temperature), True
    read = sum(len(rollout.prompt.token_ids) + len(rollout) for rollout in rollouts)
    say(f"the student scores them ({read:,} tokens with their prompts)")
    for finding in chain(check_sampler(config, parts, rollouts, asked), check_scorers(rollouts, asked, say)):
        sound = sound and finding.level != "fail"
        yield finding
    if sound:  # else the numbers are other ones, not noisy ones
        near = rollouts[:SEQUENCES]  # the far end is one of the paths' own; it is read once by each
        say(f"all of them score {sum(map(len, near)):,} tokens over other paths")
        yield from check_noise(config, parts, near, asked)
