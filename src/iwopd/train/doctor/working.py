"""Checks of the loaded models at work: masks, heads, packing, and that everybody who scores agrees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from iwopd.adapters import adapter_off, has_adapter
from iwopd.config import Config
from iwopd.lm import ResponseModel, Sequences
from iwopd.model_facts import output_rows
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.prompted import PromptedScorer
from iwopd.teacher.router import RoutedScorer, local_scorers
from iwopd.teacher.scorer import Scorer
from iwopd.teacher.server import ServerScorer
from iwopd.train.assembly import Parts
from iwopd.train.doctor.echo import TOLERANCE, TOLERANCE_HALF, ScoringPath, check_echo, own_logprobs
from iwopd.train.doctor.findings import Finding, failure, passed, warning
from iwopd.types import Rollout

SEQUENCES = 2
"""Rollouts that are scored: enough to see a wrong order, few enough to cost next to nothing."""


def local_models(parts: Parts) -> dict[str, Any]:
    """The models that live in this process, by name."""
    return {name: scorer.lm.model for kind, scorer in _scorers(parts) for name, scorer in local_scorers(scorer, kind)}


def _scorers(parts: Parts) -> list[tuple[str, Scorer | None]]:
    return [("student", parts.student_scorer), ("teacher", parts.teacher_scorer), ("reference", parts.reference_scorer)]


def known_rollouts(config: Config, parts: Parts, step: int) -> list[Rollout]:
    """What the student writes to the first prompts of a step."""
    prompts = parts.order.batch(step)[:SEQUENCES]
    return parts.sampler.sample(prompts, seed=config.seed, step=step)


def check_masks(parts: Parts) -> Iterator[Finding]:
    """Rows beyond the real ids are left out by everybody: sampling and every softmax."""
    real = len(parts.tokenizer)
    users: dict[str, int | None] = {"update": parts.learner.lm.vocab_size}
    samplers = {"sampler": parts.sampler, **{f"sampler of {name}": item for name, item in parts.eval_samplers.items()}}
    users |= {name: item.vocab_size for name, item in samplers.items()}
    local = [pair for kind, scorer in _scorers(parts) for pair in local_scorers(scorer, kind)]
    users |= {f"scores of the {name}": scorer.lm.vocab_size for name, scorer in local}
    rows = ", ".join(f"{name} {output_rows(model):,}" for name, model in local_models(parts).items())
    if wrong := [name for name, size in users.items() if size != real]:
        yield failure(
            "masks",
            f"the {wrong[0]} counts {users[wrong[0]]} ids, the tokenizer has {real:,}",
            "this is a fault of iwopd: report it",
        )
    else:
        yield passed("masks", f"sampling and all softmaxes run over the {real:,} real ids (output rows: {rows})")


def check_heads(config: Config, parts: Parts, rollouts: Sequence[Rollout]) -> Iterator[Finding]:
    """The fused head against the model's own logits, and whether sequences can be packed."""
    sequences = Sequences.from_rollouts(rollouts)
    users: dict[str, list[ResponseModel]] = {"student": [parts.learner.lm, parts.student_scorer.lm]}
    for kind, scorer in _scorers(parts)[1:]:
        users |= {name: [local.lm] for name, local in local_scorers(scorer, kind)}
    for name, lms in users.items():
        difference = max(lm.check_head(sequences) for lm in lms)
        lm = lms[0]
        if not lm.fused:
            check = failure if config.method.entropy_coef and name == "student" else warning
            needs = ", which the entropy bonus cannot use" if check is failure else ", which takes more memory"
            yield check(
                "fused head",
                f"the {name}'s own logits differ from its output matrix by {difference:.3g} (a soft cap or a scale): its own "
                f"logits are used{needs}",
                "set method.entropy_coef = 0" if check is failure else "nothing to do; another architecture would be faster",
            )
        elif lm.packing_obstacle is not None:
            yield warning(
                "fused head",
                f"the {name}'s head agrees with its own logits ({difference:.1g}), but sequences are padded to equal lengths: "
                f"{lm.packing_obstacle}",
                "nothing to do; training takes longer",
            )
        else:
            yield passed("fused head", f"the {name}'s agrees with its own logits (largest difference {difference:.1g})")


def check_sampler(config: Config, parts: Parts, rollouts: Sequence[Rollout]) -> Iterator[Finding]:
    """What the sampler calls the log-probs of its tokens is what the trainer computes for them."""
    scored = parts.student_scorer.score(rollouts)
    written = [rollout.rollout_logprobs for rollout in rollouts]
    differences = (torch.cat(scored).double() - torch.cat(written).double()).abs()
    largest, mean = float(differences.max()), float(differences.mean())
    half = is_half(parts.student) or config.precision != "no"
    if mean <= TOLERANCE_HALF if half else largest <= TOLERANCE:
        yield passed("sampler", f"its log-probs are the trainer's (largest difference {largest:.1g})")
    else:
        yield failure(
            "sampler",
            f"its log-probs differ from the trainer's by {mean:.3g} on average and up to {largest:.3g}: it writes with other "
            "weights, or reports log-probs at another temperature or of a distribution cut by top-p",
            "let it report log-probs of the whole distribution at rollout.temperature, or set temperature and top_p to 1",
        )


def check_scorers(config: Config, parts: Parts, rollouts: Sequence[Rollout]) -> Iterator[Finding]:
    """The echo test over every path of the run."""
    temperature, vocab_size = config.rollout.temperature, len(parts.tokenizer)
    models = local_models(parts)
    own = {}
    for name, model in models.items():
        if name == "reference" and model is parts.student and has_adapter(model):
            with adapter_off(model):
                own[name] = own_logprobs(model, rollouts, temperature, vocab_size)
        else:
            own[name] = own_logprobs(model, rollouts, temperature, vocab_size)
    paths = [path for kind, scorer in _scorers(parts) for path in scoring_paths(kind, scorer, half=config.precision != "no")]
    yield from check_echo(paths, own, rollouts)


def scoring_paths(name: str, scorer: Scorer | None, *, half: bool = False) -> Iterator[ScoringPath]:
    """Every way to a model's log-probs: each of several teachers, each replica of a server. `half`: the student's autocast."""
    if isinstance(scorer, PromptedScorer):  # it must be right about any prompt, so also about the student's
        yield from scoring_paths(name, scorer.scorer)
    elif isinstance(scorer, RoutedScorer):
        for route, inner in scorer.teachers.items():
            yield from scoring_paths(name if route is None else f"{name} {route!r}", inner)
    elif isinstance(scorer, ServerScorer):
        for url in scorer.settings.urls:
            alone = ServerScorer(replace(scorer.settings, urls=(url,), model=scorer.model), name=scorer.name)
            yield ScoringPath(f"{name} ({url})", name, alone, half=True)  # its precision is its own affair
    elif isinstance(scorer, LocalScorer):
        yield ScoringPath(f"{name} (local)", name, scorer, (half and name == "student") or is_half(scorer.lm.model))
    elif scorer is not None:
        yield ScoringPath(f"{name} ({type(scorer).__name__})", name, scorer, half=True)


def is_half(model: Any) -> bool:
    return any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in model.parameters())
