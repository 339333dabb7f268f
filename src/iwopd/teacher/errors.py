"""What can go wrong with a teacher."""

from __future__ import annotations

from iwopd.errors import UserError


class TeacherError(UserError, RuntimeError):
    """A teacher that answers what it should not, or refuses to answer: asking again would not help."""


class TeacherGoneError(TeacherError):
    """A teacher that was given up after waiting for it. Training saves the last finished step and ends."""

    exit_code = 1
