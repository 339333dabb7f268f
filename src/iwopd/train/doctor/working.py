"""Checks of the loaded models at work: masks, heads, packing, and that everybody who scores agrees."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from iwopd.config import Config
from iwopd.lm import ResponseModel
from iwopd.model_facts import output_rows
from iwopd.own_head import chunk_rows
from iwopd.teacher.scorer import Scorer, ScoringPath
from iwopd.train.doctor.asked import Asked
from iwopd.train.doctor.echo import agreement, check_echo
from iwopd.train.doctor.findings import Finding, failure, passed, warning
from iwopd.train.parts import Parts
from iwopd.types import Prompt, Rollout

SEQUENCES = 2
"""Rollouts that are scored: enough to see a wrong order, few enough to cost next to nothing."""
TOKENS = 256
"""Tokens of each, at most; no more than a plain forward pass gives logits of at a time, else it would take several."""
FAR_TOKENS = 32
"""Tokens that are written and scored behind a prompt so long that they stand where the longest answers end."""
FARTHEST_CPU = 4096
"""Where a CPU reads that prompt, it ends here: five passes over it take minutes with a model of a billion weights."""


def local_models(parts: Parts) -> dict[str, Any]:
    return {name: lm.model for name, lm in _local(parts).items()}


def _local(parts: Parts) -> dict[str, ResponseModel]:
    return {name: one.lm for kind, scorer in _scorers(parts).items() for name, one in scorer.local(kind).items()}


def _scorers(parts: Parts) -> dict[str, Scorer]:
    found: dict[str, Scorer] = {"student": parts.student_scorer, "teacher": parts.teacher_scorer}
    return found if parts.reference_scorer is None else {**found, "reference": parts.reference_scorer}


def _paths(parts: Parts) -> list[ScoringPath]:
    return [path for kind, scorer in _scorers(parts).items() for path in scorer.paths(kind)]


def known_rollouts(config: Config, parts: Parts, step: int) -> list[Rollout]:
    """What the student writes to the first prompts of a step: beginnings, and a few tokens at the far end of an answer.

    The same on every rank.
    """
    prompts = parts.order.batch(step)[:SEQUENCES]
    at_once = min(chunk_rows(lm.model) for lm in _local(parts).values())
    limits = [min(TOKENS, parts.max_response, at_once)] * len(prompts)

    def write(asked: Sequence[Prompt], most: Sequence[int]) -> list[Rollout]:
        return parts.ranks.together(lambda: parts.sampler.sample(asked, seed=config.seed, step=step, max_tokens=most))

    parts.before_writing()
    rollouts = write(prompts, limits)
    length = min(len(prompts[0].token_ids) + parts.max_response, parts.sampler.context, _farthest(parts)) - FAR_TOKENS
    if length <= max(len(rollout.prompt.token_ids) + len(rollout) for rollout in rollouts):
        return rollouts
    # By itself: beside it the others would be padded to its length.
    return rollouts + write([far_prompt(parts.order.prompts, length)], [FAR_TOKENS])


def _farthest(parts: Parts) -> int:
    """Where the far end of an answer may be at most."""
    on_cpu = any(lm.device.type == "cpu" for lm in _local(parts).values())
    return FARTHEST_CPU if on_cpu else sys.maxsize


def far_prompt(prompts: Sequence[Prompt], length: int) -> Prompt:
    """The prompts one after the other, over and over if need be, as one of this length."""
    pieces = itertools.chain.from_iterable(prompt.token_ids for prompt in itertools.cycle(prompts))
    return Prompt("far", tuple(itertools.islice(pieces, length)))


def check_masks(parts: Parts) -> Iterator[Finding]:
    """Rows beyond the real ids are left out by everybody: sampling and every softmax."""
    real = len(parts.tokenizer)
    users: dict[str, int | None] = {"update": parts.learner.lm.vocab_size, "sampler": parts.sampler.vocab_size}
    users |= {f"sampler of {name}": sampler.vocab_size for name, sampler in parts.eval_samplers.items()}
    local = _local(parts)
    users |= {f"scores of the {name}": lm.vocab_size for name, lm in local.items()}
    rows = ", ".join(f"{name} {output_rows(lm.model):,}" for name, lm in local.items())
    own = {path.model_name: path.reader.ids for path in _paths(parts) if path.reader is not None}
    if wrong := [name for name, size in users.items() if size != own.get(name.removeprefix("scores of the "), real)]:
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
            obstacle = parts.needs_output_matrix if name == "student" else None
            found = (
                f"the {name}'s own logits differ from its output matrix by {head.difference:.3g} (a soft cap or a scale): its "
                "own logits are used, which "
            )
            if obstacle:
                yield failure("fused head", f"{found}{obstacle} cannot use", "leave it out, or choose another student")
            elif head.chunked:
                yield warning("fused head", f"{found}takes more memory", "nothing to do; another architecture would be faster")
            else:
                size = 4e-9 * parts.max_response * len(parts.tokenizer)
                words = f"{found}exist for a whole answer at once: {size:,.1f} GB and more for {parts.max_response:,} tokens"
                yield warning("fused head", words, "lower rollout.max_tokens, or choose another architecture")
        elif head.packing_obstacle is not None:
            yield warning(
                "fused head",
                f"the {name}'s head agrees with its own logits ({head.difference:.1g}), but sequences are padded to equal "
                f"lengths: {head.packing_obstacle}",
                "nothing to do; training takes longer",
            )
        else:
            yield passed("fused head", f"the {name}'s agrees with its own logits (largest difference {head.difference:.1g})")


def check_sampler(config: Config, parts: Parts, rollouts: Sequence[Rollout], asked: Asked | None = None) -> Iterator[Finding]:
    """What the sampler calls the log-probs of its tokens is what the trainer computes for them."""
    known = asked or Asked(parts, config.rollout.temperature)
    scored, written = known.scores(parts.student_scorer, rollouts), [rollout.rollout_logprobs for rollout in rollouts]
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


def check_scorers(rollouts: Sequence[Rollout], asked: Asked, say: Callable[[str], None] = lambda _: None) -> Iterator[Finding]:
    """The echo test over every path of the run."""
    own = {}
    for kind, paths in asked.paths.items():
        say(f"the {kind}'s plain forward pass, and each path to it")
        for path in paths:
            if (values := asked.own(path, asked.read(path, rollouts))) is not None:
                own[path.model_name] = values
        yield from check_echo(paths, own, rollouts, asked.scores)
