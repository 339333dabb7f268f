"""The sandbox backends: how each starts the child, and which restrictions the child applies to itself."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from iwopd.eval.sandbox import bubblewrap, interpreter, landlock, private_folder

Name = Literal["bubblewrap", "landlock", "none"]
MEMORY = 2 << 30
"""Address space of the child in bytes. EvalPlus gives 4 GiB; the hungriest canonical solution (Mbpp/255) needs 1.3."""


@dataclass(frozen=True)
class Backend:
    """`none` is no sandbox, only another process with resource limits."""

    name: Name

    def command(self, channel: int, info: int) -> list[str]:
        """The command. `channel`: file descriptor for results; `info`: where bubblewrap reports the process it started."""
        if self.name == "bubblewrap":
            return bubblewrap.command(channel, info)
        return interpreter.command(interpreter.PACKAGE_ROOT, channel)

    def walls(self, cpu_seconds: int, folder: str) -> dict[str, Any]:
        """The restrictions that `child` applies to itself before it loads the program. It may write to `folder`."""
        landlocked = self.name == "landlock"
        readable = [*interpreter.readable(), *filter(None, [interpreter.time_zones()])]
        return {
            "parent": 0 if self.name == "bubblewrap" else os.getpid(),  # bubblewrap does this itself
            "memory": MEMORY,
            "cpu_seconds": cpu_seconds,
            "privileges": self.name != "none",
            "readable": readable if landlocked else [],
            "writable": [folder, os.devnull] if landlocked else [],
            "file_bytes": private_folder.FILE_BYTES,
            "seccomp": self.name != "none",
            # Landlock cannot forbid truncating before version 3: there, nothing may be opened for writing at all.
            "writes": not landlocked or landlock.version() >= landlock.TRUNCATES,
        }
