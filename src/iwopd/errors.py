"""The base of all errors that a user can do something about."""

from __future__ import annotations


class UserError(Exception):
    """What went wrong, with which value, and the remedy. The command line prints it as one line and exits."""

    exit_code = 2


class ConfigError(UserError, ValueError):
    """A setting that is wrong, said in words for the person who wrote it."""
