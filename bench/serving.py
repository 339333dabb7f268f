"""`iwopd serve-teacher` under load: many clients at once, each with one request under way.

    python bench/serving.py                             # 200 clients for five minutes
    python bench/serving.py --clients 20 --seconds 30

The tiny world's teacher, one thread, loopback only; sequences of 12 prompt and up to 64 answer tokens, four in a request.
Prints requests and tokens per second, the latencies of requests, errors, and the growth of the server's memory after the first
fifth of the time.

Exit code 1 if a request failed, or an answer is not what the model says.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

SEQUENCES, PROMPT, MOST = 4, 12, 64
VOCAB = 21
TOLERANCE = 1e-4
"""Log-probs of the same tokens in another batch."""


class Client(threading.Thread):
    """Asks again and again; every tenth question is one that it has asked before, and the answer must be the same."""

    def __init__(self, url: str, number: int, end: float) -> None:
        super().__init__(daemon=True)
        self.url, self.end = url, end
        self.random = random.Random(number)
        self.seconds: list[float] = []
        self.tokens = 0
        self.errors: list[str] = []

    def run(self) -> None:
        first: list[list[int]] = [self._sequence() for _ in range(SEQUENCES)]
        known: list[list[float]] | None = None
        with httpx.Client(timeout=600, trust_env=False) as client:
            while time.monotonic() < self.end and not self.errors:
                again = len(self.seconds) % 10 == 0
                asked = first if again else [self._sequence() for _ in range(SEQUENCES)]
                began = time.monotonic()
                try:
                    answer = client.post(
                        f"{self.url}/v1/completions",
                        json={"prompt": asked, "max_tokens": 1, "prompt_logprobs": 0, "return_token_ids": True},
                    )
                    answer.raise_for_status()
                    found = [_logprobs(choice["prompt_logprobs"]) for choice in answer.json()["choices"]]
                except (httpx.HTTPError, KeyError, ValueError) as error:
                    self.errors.append(f"{type(error).__name__}: {error}")
                    return
                self.seconds.append(time.monotonic() - began)
                self.tokens += sum(map(len, asked))
                if again and known is None:
                    known = found
                elif again and any(
                    abs(a - b) > TOLERANCE
                    for one, other in zip(known or [], found, strict=True)
                    for a, b in zip(one, other, strict=True)
                ):
                    self.errors.append("the same question has another answer")

    def _sequence(self) -> list[int]:
        return [self.random.randrange(2, VOCAB) for _ in range(PROMPT + self.random.randint(1, MOST))]


def _logprobs(entries: list[dict[str, dict[str, float]] | None]) -> list[float]:
    return [float(next(iter(entry.values()))["logprob"]) for entry in entries if entry]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200, help="at once (default: 200)")
    parser.add_argument("--seconds", type=float, default=300, help="how long (default: 300)")
    parser.add_argument("--lineage", type=int, default=0, help="of the world's teacher (default: 0)")
    options = parser.parse_args()
    with serving(options.lineage) as (url, pid):
        began = time.monotonic()
        clients = [Client(url, number, began + options.seconds) for number in range(options.clients)]
        for client in clients:
            client.start()
        time.sleep(options.seconds / 5)
        before = _megabytes(pid)
        for client in clients:
            client.join()
        taken, after = time.monotonic() - began, _megabytes(pid)
    seconds = sorted(second for client in clients for second in client.seconds)
    errors = [error for client in clients for error in client.errors]
    if not seconds:
        print(f"no request was answered: {errors[0] if errors else 'no error'}")
        return 1
    marks = {"median": 0.5, "95 %": 0.95, "99 %": 0.99, "longest": 1.0}
    latencies = ", ".join(
        f"{name} {seconds[min(len(seconds) - 1, int(share * len(seconds)))]:.2f} s" for name, share in marks.items()
    )
    tokens = sum(client.tokens for client in clients)
    print(
        f"{options.clients} clients, {taken:.0f} s: {len(seconds) / taken:.1f} requests, {tokens / taken:,.0f} tokens a second"
    )
    print(f"latency: {latencies}; one at a time it would be {taken / len(seconds):.3f} s")
    print(f"memory of the server: {before:.0f} MB after a fifth of the time, {after:.0f} MB at the end")
    print(f"errors: {len(errors)}" + (f", the first: {errors[0]}" if errors else ""))
    return 1 if errors else 0


@contextmanager
def serving(lineage: int) -> Iterator[tuple[str, int]]:
    """URL and process of a server."""
    from iwopd import tiny

    teacher = tiny.open_world(tiny.world_recipe("clean", lineage=lineage)).teacher
    command = [sys.executable, "-m", "iwopd", "serve-teacher", str(teacher), "--port", "0", "--threads", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        found = re.search(r"at (http://\S+) ", process.stdout.readline())
        if found is None:
            raise SystemExit("the server did not start")
        yield found[1], process.pid
    finally:
        process.terminate()
        process.wait()


def _megabytes(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    sys.exit(main())
