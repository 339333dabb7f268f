"""Checks of the loaded models at work: masks, heads, packing, and that everybody who scores agrees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from iwopd.adapters import adapter_off, has_adapter
from iwopd.config import Config
from iwopd.model_facts import output_rows
from iwopd.teacher.scorer import Scorer
from iwopd.train.assembly import Parts
from iwopd.train.doctor.echo import agreement, check_echo, own_logprobs
from iwopd.train.doctor.findings import Finding, failure, passed, warning
from iwopd.types import Rollout

SEQUENCES = 2
"""Rollouts that are scored: enough to see a wrong order, few enough to cost next to nothing."""


def local_models(parts: Parts) -> dict[str, Any]:
    return {name: one.lm.model for kind, scorer in _scorers(parts).items() for name, one in scorer.local(kind).items()}


def _scorers(parts: Parts) -> dict[str, Scorer]:
    found: dict[str, Scorer] = {"student": parts.student_scorer, "teacher": parts.teacher_scorer}
    return found if parts.reference_scorer is None else {**found, "reference": parts.reference_scorer}


def known_rollouts(config: Config, parts: Parts, step: int) -> list[Rollout]:
    """What the student writes to the first prompts of a step."""
    prompts = parts.order.batch(step)[:SEQUENCES]
    return parts.sampler.sample(prompts, seed=config.seed, step=step)


def check_masks(parts: Parts) -> Iterator[Finding]:
    """Rows beyond the real ids are left out by everybody: sampling and every softmax."""
    real = len(parts.tokenizer)
    users: dict[str, int | None] = {"update": parts.learner.lm.vocab_size, "sampler": parts.sampler.vocab_size}
    users |= {f"sampler of {name}": sampler.vocab_size for name, sampler in parts.eval_samplers.items()}
    local = {name: one.lm for kind, scorer in _scorers(parts).items() for name, one in scorer.local(kind).items()}
    users |= {f"scores of the {name}": lm.vocab_size for name, lm in local.items()}
    rows = ", ".join(f"{name} {output_rows(lm.model):,}" for name, lm in local.items())
    if wrong := [name for name, size in users.items() if size != real]:
        yield failure(
            "masks",
            f"the {wrong[0]} counts {users[wrong[0]]} ids, the tokenizer has {real:,}",
            "this is a fault of iwopd: report it",
        )
    else:
        yield passed("masks", f"sampling and all softmaxes run over the {real:,} real ids (output rows: {rows})")


def head_findings(parts: Parts) -> Iterator[Finding]:
    """What was found when the models were loaded: the fused head against their own logits, and whether they can be packed."""
    for name, head in parts.heads.items():
        if not head.fused:
            obstacle = parts.objective.needs_output_matrix if name == "student" else None
            found = (
                f"the {name}'s own logits differ from its output matrix by {head.difference:.3g} (a soft cap or a scale): its "
                "own logits are used, which "
            )
            if obstacle:
                yield failure("fused head", f"{found}{obstacle} cannot use", "leave it out, or choose another student")
            else:
                yield warning("fused head", f"{found}takes more memory", "nothing to do; another architecture would be faster")
        elif head.packing_obstacle is not None:
            yield warning(
                "fused head",
                f"the {name}'s head agrees with its own logits ({head.difference:.1g}), but sequences are padded to equal "
                f"lengths: {head.packing_obstacle}",
                "nothing to do; training takes longer",
            )
        else:
            yield passed("fused head", f"the {name}'s agrees with its own logits (largest difference {head.difference:.1g})")


def check_sampler(config: Config, parts: Parts, rollouts: Sequence[Rollout]) -> Iterator[Finding]:
    """What the sampler calls the log-probs of its tokens is what the trainer computes for them."""
    scored, written = parts.student_scorer.score(rollouts), [rollout.rollout_logprobs for rollout in rollouts]
    half = parts.student_scorer.half or parts.engine.dtype != "float32"
    agree, largest, mean = agreement(scored, written, half=half)
    if agree:
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
    own = {}
    for name, model in local_models(parts).items():
        without_adapter = name == "reference" and model is parts.student and has_adapter(model)
        with adapter_off(model) if without_adapter else nullcontext():
            own[name] = own_logprobs(model, rollouts, temperature, vocab_size)
    paths = [path for kind, scorer in _scorers(parts).items() for path in scorer.paths(kind)]
    yield from check_echo(paths, own, rollouts)
