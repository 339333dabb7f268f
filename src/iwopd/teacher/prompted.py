"""A teacher that sees another prompt than the student (`data.teacher_view`). The answer's ids are the student's.

With the student's first weights as the teacher and the reference answer in its prompt, this is self-distillation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from iwopd.teacher.scorer import Scorer
from iwopd.types import Prompt, Rollout


class PromptedScorer:
    """Any scorer, behind other prompts."""

    def __init__(self, scorer: Scorer, change: Callable[[Prompt], Prompt]) -> None:
        self.scorer, self.change = scorer, change

    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """Log-probs [T] of each rollout's response tokens after the teacher's prompt, in order.

        Training prompts are all tried out at the start. Evaluation tasks may bring prompts that are no chats: they stay as
        they are.
        """

        def seen(prompt: Prompt) -> Prompt:
            return self.change(prompt) if "messages" in prompt.metadata else prompt

        return self.scorer.score([replace(rollout, prompt=seen(rollout.prompt)) for rollout in rollouts])
