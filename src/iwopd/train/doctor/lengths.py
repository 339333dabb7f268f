"""Context lengths, and whether log-probs are taken at the sampling temperature."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from iwopd.model_facts import context_length
from iwopd.rollout.horizons import Drift
from iwopd.rope import rope_note
from iwopd.train.doctor.case import Case
from iwopd.train.doctor.findings import Finding, failure, listed, passed, warning
from iwopd.train.horizon import times_read


def check_context(case: Case, configs: Mapping[str, Any]) -> Iterator[Finding]:
    """Prompt + response + 1 tokens; a server generates the extra one to score a whole sequence."""
    if case.max_response is None:
        yield failure("context", "the length of answers is not limited", "set rollout.max_tokens")
        return
    needed = case.longest_prompt + case.max_response + 1
    what = f"{case.longest_prompt:,} (longest prompt) + {case.max_response:,} (response) + 1 = {needed:,} tokens"
    limits = {name: context_length(config) for name, config in configs.items()}
    # A teacher with another tokenizer has other lengths: it is asked for room when it is tried out (`teacher.foreign`).
    known = {name: limit for name, limit in limits.items() if limit is not None and not (name == "teacher" and case.foreign)}
    for name, limit in known.items():
        if limit < needed:
            fit = limit - case.max_response - 1
            shorter = f", or data.max_prompt_tokens to {fit:,}" if fit > 0 else ""
            message = f"the {name} has room for {limit:,} tokens (max_position_embeddings), but {what} are needed"
            yield failure(
                "context", message, f"lower rollout.max_tokens to {max(1, limit - case.longest_prompt - 1):,}{shorter}"
            )
    if known and all(limit >= needed for limit in known.values()):
        room = ", ".join(f"{name} {limit:,}" for name, limit in known.items())
        yield passed("context", f"{what}; room: {room}")


def check_rope(case: Case, configs: Mapping[str, Any]) -> Iterator[Finding]:
    """Rotary embeddings whose frequencies depend on the length: one choice for the whole run."""
    config = case.config
    longest = config.data.max_prompt_tokens + max(case.max_response or 0, config.eval.max_tokens or 0)
    for name, own in configs.items():
        if (note := rope_note(own, longest)) is None:
            continue
        elsewhere = config.rollout.engine != "local" if name == "student" else bool(config.teacher.urls)
        if elsewhere and "dynamic" in note:
            remedy = "compare its log-probs with the local ones (the echo test, correction/logprob_difference)"
            yield warning("rope", f"the {name}'s {note}; an engine or server may choose others", remedy)
        elif elsewhere and name != "student":
            remedy = f"serve it for {longest:,} tokens (vLLM: --max-model-len, serve-teacher: --max-length)"
            yield warning("rope", f"the {name}'s {note}; its server decides by the context that it was given", remedy)
        else:
            yield passed("rope", f"the {name}'s {note}")


def check_horizon(case: Case) -> Iterator[Finding]:
    """What it costs to look at answers while they are written, where a server of the teacher keeps nothing of them."""
    horizon, teacher = case.config.rollout.horizon.made, case.config.teacher
    if not isinstance(horizon, Drift) or case.max_response is None:
        return
    sources = {"teacher": teacher, **{f"teacher.others.{name}": other for name, other in teacher.others.items()}}
    again = [name for name, source in sources.items() if source.urls and source.dialect == "vllm"]
    looks = f"answers are looked at after {horizon.next_look(0)} tokens, {horizon.next_look(horizon.next_look(0))}, ..."
    if again:
        times = times_read(horizon, case.longest_prompt, case.max_response)
        yield warning(
            "horizon",
            f"{looks}, and servers of dialect 'vllm' ({listed(again)}) read all of an answer again at every look: one of "
            f"{case.max_response:,} tokens {times:.1f} times",
            "serve the teacher with `iwopd serve-teacher` (teacher.dialect = 'iwopd'), load it here, or raise "
            "rollout.horizon.block",
        )
    else:
        yield passed("horizon", f"{looks}, and the teacher reads each token once")


def check_temperature(case: Case) -> Iterator[Finding]:
    rollout = case.config.rollout
    if rollout.top_p < 1 or rollout.top_k:
        cuts = {f"top_p {rollout.top_p}": rollout.top_p < 1, f"top_k {rollout.top_k}": rollout.top_k > 0}
        cut = listed(name for name, active in cuts.items() if active)
        yield warning(
            "temperature",
            f"with {cut} the student samples from fewer ids than its log-probs are taken over, so rollouts are not quite "
            "on-policy; log-probs that an engine reports for the truncated distribution would be normalised differently",
            "set rollout.top_p = 1 and rollout.top_k = 0 (the paper's setting)",
        )
    elif rollout.temperature != 1:
        yield warning(
            "temperature",
            f"tokens are sampled, and student, teacher and reference are scored, at temperature {rollout.temperature}; engines "
            "and servers that report log-probs at temperature 1 cannot be used",
            "set rollout.temperature = 1 (the paper's setting) unless all models are local",
        )
    else:
        yield passed("temperature", "tokens are sampled and scored at temperature 1 over the whole vocabulary")
