"""Importing this registers platform and rollout engine with verl, before anything asks verl for its platform."""

from verl_testing import platform

platform.install()

from verl_testing import engine  # noqa: E402  # imports modules that ask for the platform

engine.install()
