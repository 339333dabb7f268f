"""Which fault comes when in `bench/soak.py`: every kind once, in an order drawn by seed, then every kind once more."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

SERVERS = ("teacher", "rollouts")
OF_A_SERVER = ("kill", "stop", "slow", "drop", "garbage")


def kinds(*, disk: bool) -> list[str]:
    """All kinds of faults; a full disk only where there is a small one."""
    servers = [f"{what} {server}" for server in SERVERS for what in OF_A_SERVER]
    return [*servers, "kill trainer", *(["full disk"] if disk else [])]


def schedule(chosen: Sequence[str], seed: int) -> Iterator[tuple[str, float]]:
    """Faults without end, each with its length in units of the usual one (0.5 to 1.5).

    Each round has every chosen kind once: `n` kinds are all met within the first `n` faults, whatever the seed.
    """
    if not chosen:
        raise ValueError("no kind of fault was chosen: give --only a part of a name that exists, e.g. 'kill rollouts'")
    noise = random.Random(seed)
    while True:
        for kind in noise.sample(list(chosen), len(chosen)):
            yield kind, noise.uniform(0.5, 1.5)
