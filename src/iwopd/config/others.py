"""What must hold between `[rollout.mix]` and other settings, known before anything is loaded."""

from __future__ import annotations

from iwopd.config.engines import RolloutSettings, Teacher


def mix_refused(rollout: RolloutSettings, teacher: Teacher, world: str | None) -> str | None:
    """Why others cannot answer, and what would work; None if they can, or need not."""
    mix = rollout.mix
    if not mix.active:
        return None
    if mix.field is not None and world is not None:
        return (
            f"field is {mix.field!r}, but models.world = {world!r} has no such field, it writes its own solutions: leave it out"
        )
    if mix.source == "teacher" and (why := _cannot_write(teacher)):
        return f"source is 'teacher', but {why}, or set source = 'data'"
    if mix.objective == "forward-kl" and (why := _no_distributions(teacher)):
        return f"objective is 'forward-kl', which needs the teacher's whole distributions. {why}, or set 'likelihood'"
    if rollout.horizon.made.tokens_per_step is not None:
        return (
            f"rollout.horizon.type is {rollout.horizon.type!r}, which counts the tokens that the student writes, and others "
            "write some of the answers: choose the horizon 'drift', or leave the mix out"
        )
    return None


def _cannot_write(teacher: Teacher) -> str | None:
    if teacher.urls:
        return "teacher servers (teacher.urls) only score answers: load the teacher here (models.teacher without teacher.urls)"
    if teacher.others:
        return "there are several teachers (teacher.others), and one must write: leave the others out"
    return None


def _no_distributions(teacher: Teacher) -> str | None:
    if (words := teacher.cannot_give({"states"})) is not None:
        return words
    if teacher.others:
        return "Several teachers (teacher.others) have several output matrices: leave the others out"
    return None
