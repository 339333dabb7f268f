"""Overlap of rollouts and teacher: the time of a whole step with and without it, the teacher a server in a second process.

    python bench/overlap.py                # about three minutes
    python bench/overlap.py --cores 2,3    # pin the two processes to these cores (default: the first two)

One thread a process in both modes, each process on a core of its own. Random models: student 256 wide with 4 layers,
teacher 384 wide with as many layers as make its scoring take as long as the student's rollouts (found by trying). Answers of
random length, 256 tokens on average, 512 at most. A step is rollouts, scores, old log-probs, signal and update. Sequential and
overlapped steps alternate, on the same prompts. Other load on the machine makes the figures worthless: the load is printed.

With horizons: the same with a fixed horizon of half of the longest answer, and with a teacher that follows the answers block by
block (a drift horizon that stops none: what following itself costs).

Exit code 1 if an overlapped step takes more than 80 % of a sequential one (median over the batches).
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

BAR = 0.8
VOCAB, PROMPT_TOKENS, TEACHER_WIDTH = 2048, 32, 384
FIRST_LAYERS = 6
STOPS = tuple(range(8))
"""One of them comes every 256 tokens: the models are random, and nearly all ids are equally likely."""


def make_model(width: int, layers: int) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(width)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]


@contextmanager
def teacher_server(layers: int, core: int | None) -> Iterator[str]:
    """URL of a server in a process of its own, on its own core."""
    with tempfile.TemporaryDirectory() as folder:
        make_model(TEACHER_WIDTH, layers).save_pretrained(folder)
        command = [sys.executable, "-m", "iwopd", "serve-teacher", folder, "--port", "0", "--threads", "1", "--name", "teacher"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            if core is not None:
                os.sched_setaffinity(process.pid, {core})  # its threads do not exist yet, and will inherit it
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"at (http://\S+) ", line)
            if found is None:
                raise SystemExit(f"the server did not start: {line}")
            yield found[1]
        finally:
            process.terminate()
            process.wait()


class Bench:
    """A student that can make steps with a teacher at a URL."""

    def __init__(self, prompts: int, length: int) -> None:
        import torch

        from iwopd.algo.objectives import make_objective
        from iwopd.config import Optim
        from iwopd.lm import ResponseModel
        from iwopd.rollout.local import LocalSampler
        from iwopd.rollout.sampling import SamplingSettings
        from iwopd.teacher.local import LocalScorer
        from iwopd.train.learner import Learner
        from iwopd.train.ranks import Ranks

        torch.set_num_threads(1)
        self.prompts = prompts
        self.generator = torch.Generator().manual_seed(0)
        student = make_model(256, 4)
        self.ranks = Ranks()
        self.sampler = LocalSampler(student, SamplingSettings(length, stop_ids=STOPS))
        self.old_scorer = LocalScorer(student)
        objective = make_objective({"weights": "cumulative-share"})
        self.learner = Learner(ResponseModel(student), Optim(lr=1e-6), objective, self.ranks)
        self.number = 0

    def batch(self) -> list[Any]:
        import torch

        from iwopd.types import Prompt

        self.number += 1
        ids = torch.randint(6, VOCAB, (self.prompts, PROMPT_TOKENS), generator=self.generator).tolist()
        return [Prompt(f"{self.number}/{row}", tuple(row_ids)) for row, row_ids in enumerate(ids)]

    def stages(self, scorer: Any, rounds: int = 3) -> tuple[float, float]:
        """Seconds of rollouts and of the teacher's scores, one after the other: medians of some rounds."""
        written, scored = [], []
        for _ in range(rounds):
            start = time.perf_counter()
            rollouts = self.sampler.sample(self.batch(), seed=0, step=self.number)
            written.append(time.perf_counter() - start)
            start = time.perf_counter()
            scorer.score(rollouts)
            scored.append(time.perf_counter() - start)
        return statistics.median(written), statistics.median(scored)

    def step(self, scorer: Any, prompts: list[Any], overlap: bool, *, limit: int | None = None, follows: bool = False) -> float:
        """Seconds of one whole step; `limit`: of a fixed horizon, `follows`: the teacher follows the answers."""
        from iwopd.rollout.horizons import Drift
        from iwopd.train.pipeline import write_step
        from iwopd.train.watching import Watching

        start = time.perf_counter()
        horizon: Any = {"limit": limit, "watching": Watching(Drift(threshold=1e-300), scorer.follow()) if follows else None}
        written = write_step(
            prompts, self.sampler, scorer, self.ranks, seed=0, step=self.number, score_early=overlap, **horizon
        )
        rollouts = written.rollouts
        forward = self.learner.forward(rollouts)
        old = self.old_scorer.score(rollouts) if forward is None else [one.logprobs for one in forward.scores]
        self.update(rollouts, old, forward, [one.logprobs for one in written.teacher_scores(rollouts)])
        return time.perf_counter() - start

    def update(self, rollouts: list[Any], old: list[Any], forward: Any, scores: list[Any]) -> None:
        from iwopd.train.scoring import evidence_of, loss_columns
        from iwopd.types import ScoredRollout, TokenBatch

        batch = TokenBatch.collate([ScoredRollout(*items) for items in zip(rollouts, old, scores, strict=True)])
        columns = loss_columns(self.learner.objective, batch, evidence_of(batch))
        self.learner.update(batch, columns, seed=0, step=self.number, forward=forward)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--length", type=int, default=512, help="longest response")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cores", default="", help="two cores, e.g. 0,1")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    cores = _cores(options.cores)
    if cores:
        os.sched_setaffinity(0, {cores[0]})

    from iwopd.config.engines import TeacherSource
    from iwopd.teacher.server import ServerScorer

    bench = Bench(options.prompts, options.length)
    place = cores[1] if cores else None
    layers = FIRST_LAYERS
    for _ in range(3):
        with teacher_server(layers, place) as url:
            rollout, teacher = bench.stages(ServerScorer(TeacherSource(urls=[url])))
        print(f"teacher of {layers} layers: rollouts {rollout:.2f} s, scores {teacher:.2f} s", flush=True)
        if abs(teacher / rollout - 1) < 0.1:
            break
        layers = max(1, round(layers * rollout / teacher))
    half = {"limit": options.length // 2}
    kinds: dict[str, tuple[bool, dict[str, Any]]] = {
        "sequential": (False, {}),
        "overlapped": (True, {}),
        "sequential, fixed horizon": (False, half),
        "overlapped, fixed horizon": (True, half),
        "followed block by block": (False, {"follows": True}),
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    with teacher_server(layers, place) as url:
        scorer = ServerScorer(TeacherSource(urls=[url], dialect="iwopd"))
        for number in range(options.rounds + 1):
            prompts = bench.batch()
            for name, (overlap, horizon) in kinds.items():
                took = bench.step(scorer, prompts, overlap, **horizon)
                seconds[name] += [took] if number else []  # the first warms up
        rollout, teacher = bench.stages(scorer)
    print(f"stages, one after the other: rollouts {rollout:.2f} s, scores {teacher:.2f} s; load {os.getloadavg()[0]:.1f}")
    print("| step | median s | fastest s |\n| --- | --- | --- |")
    for name, times in seconds.items():
        print(_row(name, times))
    ratio = _ratio(seconds["overlapped"], seconds["sequential"])
    shorter = _ratio(seconds["overlapped, fixed horizon"], seconds["sequential, fixed horizon"])
    followed = _ratio(seconds["followed block by block"], seconds["sequential"])
    print(f"overlapped / sequential, median over {options.rounds} batches: {ratio:.2f} (the bar is {BAR})")
    print(f"the same with a fixed horizon: {shorter:.2f}; followed / sequential: {followed:.2f}")
    sys.exit(ratio > BAR)


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over batches."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def _row(name: str, times: Sequence[float]) -> str:
    return f"| {name} | {statistics.median(times):.2f} | {min(times):.2f} |"


def _cores(text: str) -> list[int]:
    """Two cores to pin to; none where the system cannot pin or has only one."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    chosen = [int(word) for word in text.split(",")] if text else sorted(os.sched_getaffinity(0))[:2]
    return chosen if len(chosen) == 2 else []


if __name__ == "__main__":
    main()
