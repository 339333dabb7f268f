"""Machines that are network namespaces: own address, own mounts, one switch between them. Needs root and iproute2.

with machines(3) as nodes:
    job = Job(nodes[0].inside(["ray", "start", ...]), ...)
    nodes[2].link("down")
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

NETWORK = "10.77.0"
INTERFACE = "eth0"
"""Of every machine, for GLOO_SOCKET_IFNAME."""


def why_not() -> str:
    """Why this computer cannot have such machines; empty if it can."""
    missing = [tool for tool in ("ip", "nsenter", "mount") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian: iproute2, util-linux)"
    name = f"iw{os.getpid()}try"
    tried = _run("ip", "netns", "add", name, check=False)
    if tried.returncode:
        return f"network namespaces cannot be made here: {tried.stderr.strip()}"
    link = _run("ip", "-netns", name, "link", "add", "br0", "type", "bridge", check=False)
    _run("ip", "netns", "delete", name)
    return f"bridges cannot be made here: {link.stderr.strip()}" if link.returncode else ""


class Machine:
    """One namespace with one card."""

    def __init__(self, number: int, switch: str) -> None:
        self.name, self.switch, self.port = f"iw{os.getpid()}n{number}", switch, f"port{number}"
        self.address = f"{NETWORK}.{number}"
        _run("ip", "netns", "add", self.name)
        _run("ip", "link", "add", INTERFACE, "netns", self.name, "type", "veth", "peer", "name", self.port, "netns", switch)
        _run("ip", "-netns", switch, "link", "set", self.port, "master", "br0", "up")
        for words in (
            ["link", "set", "lo", "up"],
            ["link", "set", INTERFACE, "up"],
            ["address", "add", f"{self.address}/24", "dev", INTERFACE],
            ["route", "add", "default", "via", f"{NETWORK}.254"],  # nobody is there: programs ask it for their own address
        ):
            _run("ip", "-netns", self.name, *words)

    def inside(self, command: Sequence[str], before: str = "") -> list[str]:
        """The command in this machine, with mounts of its own; `before` is shell text that runs first (mounts)."""
        script = f'{before or "true"} && exec "$@"'
        return ["ip", "netns", "exec", self.name, "sh", "-c", script, "sh", *command]

    def link(self, state: str) -> None:
        """Unplug it from the switch (`down`), or plug it in again (`up`)."""
        _run("ip", "-netns", self.switch, "link", "set", self.port, state)

    def slow(self, rate: str) -> None:
        """Its card sends no more than this, e.g. `1mbit`."""
        limit = ["tbf", "rate", rate, "burst", "32kbit", "latency", "400ms"]
        _run("tc", "-netns", self.name, "qdisc", "replace", "dev", INTERFACE, "root", *limit)

    def fast(self) -> None:
        _run("tc", "-netns", self.name, "qdisc", "delete", "dev", INTERFACE, "root")

    def remove(self) -> None:
        """The namespace goes as soon as its last process has ended, its cable at once."""
        _run("ip", "-netns", self.switch, "link", "delete", self.port, check=False)
        _run("ip", "netns", "delete", self.name, check=False)


@contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """So many machines on one switch, which is a namespace, too: nothing of it is seen from outside."""
    switch = f"iw{os.getpid()}sw"
    with ExitStack() as stack:
        _run("ip", "netns", "add", switch)
        stack.callback(_run, "ip", "netns", "delete", switch, check=False)
        _run("ip", "-netns", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-netns", switch, "link", "set", "br0", "up")
        made = []
        for number in range(1, count + 1):
            made.append(machine := Machine(number, switch))
            stack.callback(machine.remove)
        yield made


def as_in(pid: int, command: Sequence[str]) -> list[str]:
    """The command with network and mounts of a running process."""
    return ["nsenter", "--net", "--mount", f"--target={pid}", "--", *command]


def _run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done
