"""Whether a step keeps the teacher's hidden states from its scores to the loss, and what it keeps of every token."""

from __future__ import annotations

from iwopd.algo.objectives import Objective
from iwopd.algo.views import NOTHING, Wanted

KEPT_STATES = 2**31
"""Bytes of the teacher's hidden states that a step may keep in main memory; beyond, the teacher reads the batch twice."""
COPIES = 3
"""Of what is kept of each token: rollout by rollout, as one batch, and in the loss's columns."""


def keeps_states(objective: Objective, *, again: bool, most: float, ranks: int) -> bool:
    """`again`: the teacher's model is in this process and could compute them again; `most`: bytes of a step's states."""
    if not objective.asks.teacher.states:
        return False
    needed_now = objective.needs_whole_kl or not again
    return needed_now or (ranks == 1 and most <= KEPT_STATES)


def keeps_others_states(objective: Objective, *, own: bool, again: bool, most: float, ranks: int) -> bool:
    """The same of answers that others wrote, where their objective needs it: as the student's (`own`), if its objective needs
    its own.
    """
    return own if objective.needs_teacher_distribution else not again or (ranks == 1 and most <= KEPT_STATES)


def followed_for(wanted: Wanted, *, keeps: bool) -> Wanted:
    """What a teacher that follows answers is asked for. Ids that are chosen later are scored from its states, if it `keeps`
    them; else it reads the answers again.
    """
    if not wanted.chosen:
        return wanted
    return Wanted(states=True) if keeps else NOTHING


def kept_bytes(objective: Objective, *, tokens: int, state: int, ranks: int = 1, again: bool = True) -> float:
    """Bytes that a step of so many tokens keeps in main memory beside log-probs; `state`: of one hidden state.

    `again`: the teacher could compute its states again (`keeps_states`).
    """
    support = objective.compared_ids
    ids = 0 if support is None else support.k * (2 if support.of == "union" else 1)
    states = state if keeps_states(objective, again=again, most=tokens * state, ranks=ranks) else 0
    return float(tokens * (COPIES * ids * (8 + 4) + 2 * states))
