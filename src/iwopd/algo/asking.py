"""What student and teacher are asked for, so that an objective gets its evidence; and the evidence made of their answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from iwopd.algo.top_k import shared_ids, top_k_kl
from iwopd.algo.views import NO_ID, NOTHING, REST_FLOOR, TokenScores, Wanted

SupportOf = Literal["teacher", "student", "union"]


@dataclass(frozen=True)
class Support:
    """Over which ids distributions are compared: the k likeliest of one of the models, or of both."""

    k: int
    of: SupportOf = "teacher"


@dataclass(frozen=True)
class Asked:
    """Beside the log-probs of the written tokens."""

    student: Wanted = NOTHING
    teacher: Wanted = NOTHING

    @property
    def student_first(self) -> bool:
        """The teacher is asked for ids that the student finds likely, so the student must be scored before it."""
        return self.teacher.chosen


def asked_for(
    needs: Collection[str], *, overlap_k: int = 0, kl_k: int = 0, support: Support | None = None, states: bool = False
) -> Asked:
    """What must be asked for this evidence; `states`: also the teacher's hidden states.

    A KL over all ids is made of both models' states; one over the student's `kl_k` likeliest, of log-probs of these.
    """
    both = overlap_k if "top_overlap" in needs else 0
    of_student = support is not None and support.of != "teacher"
    of_teacher = support is not None and support.of != "student"
    size = 0 if support is None else support.k
    top_kl = kl_k if "kl" in needs else 0
    whole = "kl" in needs and not kl_k
    chosen = of_student or top_kl > 0
    return Asked(
        Wanted("student_entropy" in needs, max(both, top_kl, size if of_student else 0), states=whole),
        Wanted("teacher_entropy" in needs, max(both, size if of_teacher else 0), chosen=chosen, states=whole or states),
    )


def further_evidence(
    needs: Collection[str],
    student: TokenScores,
    teacher: TokenScores,
    *,
    overlap_k: int = 0,
    kl_k: int = 0,
    support: Support | None = None,
) -> dict[str, Tensor]:
    """Evidence [T, ...] of one rollout by name, apart from a `kl` over all ids, which needs both models' output matrices."""
    found: dict[str, Any] = {}
    if "student_entropy" in needs:
        found["student_entropy"] = student.entropy
    if "teacher_entropy" in needs:
        found["teacher_entropy"] = teacher.entropy
    if "top_overlap" in needs and student.top_ids is not None and teacher.top_ids is not None:
        found["top_overlap"] = shared_ids(student.top_ids[:, :overlap_k], teacher.top_ids[:, :overlap_k])
    if "kl" in needs and kl_k:
        ours, theirs = student.top_logprobs, teacher.chosen_logprobs
        found["kl"] = None if ours is None or theirs is None else top_k_kl(ours[:, :kl_k], theirs[:, :kl_k])
    if support is not None:
        found |= _support(support, student, teacher)
    missing = [name for name, values in found.items() if values is None]
    if missing:
        raise ValueError(f"{missing[0]} is needed, but the model that was asked did not give it")
    return found


def _support(support: Support, student: TokenScores, teacher: TokenScores) -> Mapping[str, Tensor]:
    """Ids without repetition, the teacher's log-probs of them, and its log-prob of the rest."""
    if teacher.rest is None:
        raise ValueError("a support is needed, but the teacher did not say how much probability lies outside it")
    ids, logprobs, rest = [], [], [teacher.rest[:, None]]
    if support.of != "student" and teacher.top_ids is not None and teacher.top_logprobs is not None:
        ids.append(teacher.top_ids[:, : support.k])
        logprobs.append(teacher.top_logprobs[:, : support.k])
    if support.of != "teacher" and student.top_ids is not None and teacher.chosen_logprobs is not None:
        chosen = student.top_ids[:, : support.k]
        ids.append(torch.where(_among(chosen, ids[0]), NO_ID, chosen) if ids else chosen)
        logprobs.append(teacher.chosen_logprobs[:, : support.k])
    found, values = torch.cat(ids, 1), torch.cat(logprobs, 1)
    named = found  # the teacher's rest is without all ids that it named: those that the support does not take go back into it
    for more, known in ((teacher.top_ids, teacher.top_logprobs), (student.top_ids, teacher.chosen_logprobs)):
        if more is not None and known is not None:
            rest.append(torch.where(_among(more, named), -torch.inf, known))
            named = torch.cat([named, more], 1)
    return {
        "support_ids": found,
        "support_logprobs": torch.where(found == NO_ID, 0.0, values),
        "support_rest": torch.cat(rest, 1).logsumexp(1).clamp(min=REST_FLOOR),
    }


def _among(ids: Tensor, others: Tensor) -> Tensor:
    """[T, K] whether each of `ids` [T, K] is one of the token's `others` [T, L]."""
    return (ids[:, :, None] == others[:, None, :]).any(-1)
