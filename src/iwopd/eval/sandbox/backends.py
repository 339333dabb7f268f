"""The walls to choose from. Each says how the child is started and what the child must take from itself."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from iwopd.eval.sandbox import bubblewrap, interpreter

Name = Literal["bubblewrap", "landlock", "none"]
MEMORY = 2 << 30
"""Address space of the child in bytes. EvalPlus gives 4 GiB; the hungriest canonical solution (Mbpp/255) needs 1.3."""


@dataclass(frozen=True)
class Backend:
    """`none` is no sandbox: another process with limits to its resources, and that is all."""

    name: Name

    def command(self, channel: int, info: int) -> list[str]:
        """What to execute. `channel`: where results go; `info`: where bubblewrap says which process it started."""
        if self.name == "bubblewrap":
            return bubblewrap.command(channel, info)
        return interpreter.command(interpreter.package_root(), channel)

    def walls(self, cpu_seconds: int) -> dict[str, Any]:
        """What `child` has to put around itself before it touches the program."""
        return {
            "parent": 0 if self.name == "bubblewrap" else os.getpid(),  # bubblewrap sees to it by itself
            "memory": MEMORY,
            "cpu_seconds": cpu_seconds,
            "privileges": self.name != "none",
            "readable": list(interpreter.readable()) if self.name == "landlock" else [],
            "seccomp": self.name != "none",
        }
