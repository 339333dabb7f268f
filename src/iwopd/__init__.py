"""Importance-weighted on-policy distillation: the method, and the tools to train, probe and report with it."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("iwopd")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
