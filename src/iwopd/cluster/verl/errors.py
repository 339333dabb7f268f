"""What stops a job on verl."""

from __future__ import annotations

from iwopd.errors import UserError


class VerlError(UserError, ValueError):
    """A setting of verl, or a tensor that it does not carry, with which the method would not be the method."""


class SyncError(VerlError):
    """Rollout servers that do not have the student's weights."""

    exit_code = 1  # nothing in the recipe is wrong
