"""Importance-weighted on-policy distillation: the method, and the tools to train, probe and report with it."""

from typing import TYPE_CHECKING

__all__ = ["__version__"]

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """The version, when somebody asks: looking it up takes longer than everything else before a command begins."""
        if name != "__version__":
            raise AttributeError(f"module 'iwopd' has no attribute {name!r}")
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("iwopd")
        except PackageNotFoundError:  # a source tree that was never installed
            return "0+unknown"
