"""What the loop works with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from iwopd.algo.objectives import OF_OTHERS, Objective, needs_distributions
from iwopd.algo.views import Wanted
from iwopd.data.prompts import MixedOrder, PromptOrder
from iwopd.eval.task import Task
from iwopd.lm import HeadCheck
from iwopd.rollout.engine import Engine
from iwopd.rollout.sampler import Sampler
from iwopd.teacher.cached import CachedScorer
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.offload import OffloadedScorer
from iwopd.teacher.scorer import Scorer
from iwopd.train.activity import Activity
from iwopd.train.learner import Learner
from iwopd.train.mix import Others
from iwopd.train.ranks import Ranks
from iwopd.train.reward import Rewards
from iwopd.train.thinking import ThinkingTokens
from iwopd.train.tokenizers import Foreign


@dataclass
class Parts:
    """What the loop works with. A context manager: leaving it closes the engine."""

    tokenizer: Any
    student: Any
    order: PromptOrder | MixedOrder
    objective: Objective
    sampler: Sampler
    eval_samplers: dict[str, Sampler]
    """By task."""
    student_scorer: LocalScorer
    teacher_scorer: Scorer
    reference_scorer: Scorer | None
    learner: Learner
    heads: dict[str, HeadCheck]
    """Of every model in this process, by name."""
    tasks: list[Task]
    ranks: Ranks
    engine: Engine
    """Shared by the samplers."""
    max_response: int
    """Most tokens of a rollout."""
    score_early: bool
    """The teacher scores finished answers while others are being written."""
    teacher_wanted: Wanted
    """What it is asked for beside log-probs."""
    followed: Wanted
    """The same of a teacher that follows answers: which ids the student finds likeliest is not known yet."""
    rewards: Rewards | None = None
    """Who judges the rollouts; None: nobody."""
    others: Others | None = None
    """Who answers some of the prompts instead of the student; None: nobody."""
    thinking: ThinkingTokens | None = None
    """Finds the thinking blocks of rollouts; None: nobody asks."""
    offloaded: Sequence[OffloadedScorer] = ()
    """Local teachers that leave the accelerator when they have scored."""
    caches: Sequence[CachedScorer] = ()
    """Teachers whose scores are kept on disk."""
    agreement: float = 0.0
    """Running mean of the agreement of gradients before and after drifts, over the steps so far (`algo.agreement`)."""
    foreign: Foreign = field(default_factory=dict)
    """Tokenizers of teachers whose ids mean something else than the student's."""
    held: ExitStack = field(default_factory=ExitStack)
    """What is given up when the engine is closed: the folder through which it gets weights."""
    activity: Activity = field(default_factory=Activity)
    """Hears what is being done."""

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.held.close()

    def report_to(self, activity: Activity) -> None:
        """Tell it how far all work of a step is."""
        self.activity, activity.processes = activity, self.ranks.count
        for sampler in (self.sampler, *self.eval_samplers.values()):
            sampler.progress = activity.advance
        for scorer in self.teacher_scorer.local("teacher").values():
            if isinstance(scorer, LocalScorer):
                scorer.progress = activity.scored
        self.learner.progress = activity.advance

    @property
    def needs_output_matrix(self) -> str | None:
        """Why log-probs of the written tokens are not enough for the loss; None if they are."""
        mix = self.others and self.others.settings
        of_mix = f"rollout.mix.objective = {mix.objective!r}" if mix and needs_distributions(OF_OTHERS[mix.objective]) else None
        return self.objective.needs_output_matrix or of_mix

    def data_fingerprint(self) -> str:
        """Shows whether a resumed run has the same data."""
        return self.order.fingerprint() + (self.others.fingerprint if self.others else "")

    def before_writing(self) -> None:
        """Called by all ranks before they write. An engine elsewhere has one copy of the weights for all: it gets them here."""
        self.rest_teachers()
        if self.engine.weights == "elsewhere":
            self.ranks.together(self.engine.update_weights)

    def rest_teachers(self) -> None:
        """Called when the teachers have scored: those that are offloaded make room for the student."""
        for teacher in self.offloaded:
            teacher.leave()
