"""Evidence: what is known of a batch of rollouts before its update, and how formulas ask for it.

A weight rule or an advantage is a function. It asks for evidence by the names of its parameters: one called `gap` receives
the gaps, one called `progress` the share of training done. Parameters with other names are the formula's own settings and have
defaults. What no formula asks for is never computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from iwopd.algo._checks import check_all, check_batch_mask, check_tokens, keep, wide
from iwopd.algo.logprobs import floor_logprobs
from iwopd.registry import suggestion

FURTHER = {
    "student_entropy": "[B, T] entropy of the old policy's next-token distribution, in nats",
    "teacher_entropy": "[B, T] entropy of the teacher's, in nats",
    "kl": "[B, T] KL(student || teacher) of the old policy over all ids, or over the student's k likeliest (a parameter k > 0)",
    "top_overlap": "[B, T] share of the k likeliest ids that student and teacher have in common; k: a parameter of the rule",
    "correct": "[B, T] the rollout's reward in [0, 1] on each of its tokens; NaN where its checker gave no verdict",
    "prompt": "[B, T] number of the prompt that the rollout answers, on each of its tokens",
}
"""Evidence beside log-probs: somebody must be asked for it."""
EVIDENCE = {
    "mask": "[B, T] valid tokens",
    "gap": "[B, T] a = lp_T - lp_0",
    "old_logprobs": "[B, T] lp_0, of the policy that wrote the rollouts",
    "teacher_logprobs": "[B, T] lp_T, of the teacher",
    "reference_logprobs": "[B, T] lp_R, of the reference model",
    "progress": "share of training done, in [0, 1]",
    "agreement": "running mean of cos(gradient of the tokens before drifts, of those after), in [-1, 1]; 0 at the first step",
    **FURTHER,
}
"""Everything that a formula can ask for."""
NUMBERS = {"progress": 0, "agreement": -1}
"""What is one number for the whole batch, and the least that it can be; at most 1."""
SUPPORT = "support"
"""An objective can also ask for the teacher's log-probs of the ids of a support, and of the rest."""
WEIGHTS = "weights"
"""An advantage can also ask for the token weights: it then applies them itself."""
TEACHER_DISTRIBUTION = "teacher_distribution"
"""An objective can also ask for the teacher's whole distributions: its loss then gets the teacher's hidden states."""


FOR_OBJECTIVES = {
    TEACHER_DISTRIBUTION: "the teacher's hidden states and output matrix (support 'full': a local teacher or iwopd's server)",
    SUPPORT: "the teacher's log-probs of likely ids and of the rest (support 'top-k'; of the teacher's ids: any server)",
}
"""What only objectives can ask for."""


@dataclass(frozen=True)
class Evidence:
    """Log-probs [B, T] of the tokens of whole rollouts, right-padded, and where training stands. Nothing carries a gradient."""

    teacher_logprobs: Tensor
    old_logprobs: Tensor
    mask: Tensor
    """Boolean."""
    reference_logprobs: Tensor | None = None
    progress: float | None = None
    agreement: float | None = None
    """Of the steps before this one (`algo.agreement`)."""
    rollout_logprobs: Tensor | None = None
    """The generating engine's own, where they are not the trainer's: for the rollout correction only."""
    student_entropy: Tensor | None = None
    teacher_entropy: Tensor | None = None
    kl: Tensor | None = None
    top_overlap: Tensor | None = None
    correct: Tensor | None = None
    prompt: Tensor | None = None
    reward_advantages: Tensor | None = None
    """What a task reward adds to the weighted advantage, its coefficient applied."""
    support_ids: Tensor | None = None
    """[B, T, K] int64 ids over which distributions are compared; `views.NO_ID` in empty places."""
    support_logprobs: Tensor | None = None
    """[B, T, K] the teacher's."""
    support_rest: Tensor | None = None
    """[B, T] the teacher's log-prob of everything else."""
    spans: Tensor | None = None
    """[B, T] int64, of a teacher with another tokenizer: the span of each token (`algo.spans`), -1 where it says nothing. Then
    `teacher_logprobs` has a span's log-prob on its last token and 0 elsewhere, and formulas see spans instead of tokens."""

    @cached_property
    def gap(self) -> Tensor:
        """`a[t] = lp_T[t] - lp_0[t]`, 0 outside the mask."""
        return gap(self.teacher_logprobs, self.old_logprobs, self.mask)

    def select(self, names: Collection[str], who: str) -> dict[str, Any]:
        """The evidence of these names. What is missing is refused; `who` needs it."""
        found = {name: getattr(self, name) for name in names if name != WEIGHTS}
        for name, value in found.items():
            if value is None:
                raise ValueError(f"{who} needs {name}: {EVIDENCE.get(name, 'what a support holds')}")
        return found


@torch.no_grad()
def gap(teacher_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """`a[t] = lp_T[t] - lp_0[t]` with a teacher's -inf floored, 0 outside the mask (Eq. 6)."""
    check_all(mask, old_logprobs=old_logprobs)
    return keep(floor_logprobs(teacher_logprobs, mask).logprobs - old_logprobs, mask)


def prefix_sum(values: Tensor) -> Tensor:
    """Exclusive cumulative sum along the rollout: entry t holds the sum over k < t."""
    return torch.nn.functional.pad(values.cumsum(-1), (1, 0))[..., :-1]


@dataclass(frozen=True)
class Formula:
    """A function of evidence, with what a reader and a caller must know about it."""

    kind: ClassVar[str] = "formula"
    """What messages call it."""
    name: str
    function: Callable[..., Tensor]
    formula: str = ""
    source: str = ""
    """Where it comes from: equation, table or figure."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The evidence it asks for, by the names of its parameters."""
        return tuple(name for name in inspect.signature(self.function).parameters if name in (*EVIDENCE, WEIGHTS))

    @property
    def params(self) -> dict[str, Any]:
        """Its own parameters and their defaults."""
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        given = inspect.signature(self.function).parameters.items()
        return {name: one.default for name, one in given if one.kind in named and name not in (*EVIDENCE, WEIGHTS)}

    @classmethod
    def adopt(cls, name: str, loaded: Any, where: str) -> Self:
        """What an entry point names: a formula of this kind, or a function of evidence and settings with defaults."""
        if isinstance(loaded, cls):
            return replace(loaded, name=name)
        if not callable(loaded):
            raise TypeError(f"must be a function or an instance of {cls.__name__}, got {loaded!r}")
        made = cls(name, loaded, formula=(inspect.getdoc(loaded) or "").partition("\n")[0], source=where)
        for parameter, default in made.params.items():
            if default is inspect.Parameter.empty:
                raise TypeError(f"its parameter {parameter!r} is no evidence ({', '.join(EVIDENCE)}) and needs a default")
        return made

    def check_params(self, params: Mapping[str, object], *more: str) -> None:
        """Refuse parameters that it does not have, and name those that it has."""
        known, types = [*self.params, *more], get_type_hints(self.function)
        for name, value in params.items():
            if name not in known:
                raise ValueError(f"{self.kind} {self.name!r} has no parameter {name!r}{suggestion(name, known)}")
            if name in types and not _fits(value, types[name]):
                raise ValueError(f"{self.kind} {self.name!r}: {name} must be {_in_words(types[name])}, got {value!r}")

    def describe(self) -> dict[str, Any]:
        """What `iwopd methods --json` prints of it."""
        title = getattr(self, "title", "") or self.name
        needs = [name for name in self.needs if name not in ("mask", WEIGHTS)]
        about = {"name": self.name, "title": title, "formula": self.formula, "source": self.source}
        return {**about, "params": self.params, "needs": needs, "beside_logprobs": [name for name in needs if name in FURTHER]}


def _fits(value: object, wanted: Any) -> bool:
    """Whether a value is of an annotated type, as far as settings have types: numbers, words, flags, and choices of them."""
    if get_origin(wanted) is Literal:
        return value in get_args(wanted)
    if get_args(wanted):
        return any(_fits(value, one) for one in get_args(wanted))
    if wanted in (float, int):
        return isinstance(value, (int, float) if wanted is float else int) and not isinstance(value, bool)
    return isinstance(value, wanted) if isinstance(wanted, type) else True


def _in_words(wanted: Any) -> str:
    if get_origin(wanted) is Literal:
        return " or ".join(map(repr, get_args(wanted)))
    plain = {float: "a number", int: "a whole number", bool: "true or false", str: "a text", type(None): "left out"}
    return " or ".join(map(_in_words, get_args(wanted))) or plain.get(wanted, getattr(wanted, "__name__", str(wanted)))


def prepare(needed: Mapping[str, Any]) -> dict[str, Any]:
    """Evidence as rules get it: checked, detached, in float64, 0 outside the mask; numbers checked."""
    mask = needed["mask"]
    check_batch_mask(mask)
    ready: dict[str, Any] = {"mask": mask}
    for name, values in needed.items():
        if name in NUMBERS:
            least = NUMBERS[name]
            if not least <= values <= 1:
                raise ValueError(f"{name} must lie in [{least}, 1], got {values}")
            ready[name] = float(values)
        elif name != "mask":
            known = mask
            if name == "correct":  # NaN: no verdict
                known = mask & ~values.isnan()
                if (wrong := known & ~((values >= 0) & (values <= 1))).any():
                    raise ValueError(f"correct must lie in [0, 1], got {float(values[wrong][0])}")
            check_tokens(name, values, known)
            ready[name] = wide(keep(values.detach(), mask))
    return ready
