"""The teacher's state in words, for whoever watches a run."""

from __future__ import annotations

from collections.abc import Callable

from iwopd.config import Config
from iwopd.teacher.cached import CachedScorer
from iwopd.teacher.foreign import ForeignScorer
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.prompted import PromptedScorer
from iwopd.teacher.replicas import Replica
from iwopd.teacher.router import RoutedScorer
from iwopd.teacher.scorer import Scorer
from iwopd.teacher.server import ServerScorer


def teacher_state(config: Config, teacher: Scorer) -> Callable[[], str]:
    """A function that says how the teachers of a run are at the moment."""
    here = {name: one for name, one in teacher.local("teacher").items() if isinstance(one, LocalScorer)}
    replicas = servers_of(teacher)

    def state() -> str:
        devices = sorted({str(one.lm.device) for one in here.values()})
        local = [f"in this process, on {', '.join(devices)}"] if here else []
        if config.teacher.is_student:
            local = [f"the student itself ({config.teacher.source})"]
        return "; ".join([*local, *_of_servers(replicas)])

    return state


def servers_of(scorer: Scorer) -> list[Replica]:
    """All servers inside a teacher, however it is put together."""
    if isinstance(scorer, RoutedScorer):
        return [replica for inner in scorer.teachers.values() for replica in servers_of(inner)]
    if isinstance(scorer, CachedScorer | PromptedScorer | ForeignScorer):
        return servers_of(scorer.scorer)
    return scorer.servers.replicas if isinstance(scorer, ServerScorer) else []


def _of_servers(replicas: list[Replica]) -> list[str]:
    """Those that fail by name; the others by their number if they are many."""
    failing = [one.state for one in replicas if one.silent]
    good = [one for one in replicas if not one.silent]
    return failing + ([one.state for one in good] if len(good) < 3 else [f"{len(good)} servers answer"])
