"""Checkpoints and real trouble: `kill -9` at any moment, a full disk, a disk that cannot be written, a reader beside a writer.

This file is also the program that is killed. Importing transformers takes seconds, so one process (`Nursery`) imports it
once and forks a child for every life.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, Qwen3Config

from iwopd.train.checkpoint import Checkpoint, CheckpointError, CheckpointStore
from waiting import PATIENCE

KILLS = 30


def build(hidden: int = 16) -> tuple[Any, AdamW]:
    torch.manual_seed(0)
    random.seed(0)
    config = Qwen3Config(
        vocab_size=24,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config).train()  # type: ignore[no-untyped-call]
    return model, AdamW(model.parameters(), lr=1e-3)


def train(model: Any, optimizer: AdamW) -> None:
    ids = torch.randint(24, (2, 8))
    (model(input_ids=ids, labels=ids).loss * random.random()).backward()
    optimizer.step()
    optimizer.zero_grad()


def fill(model: torch.nn.Module, optimizer: AdamW, value: float) -> None:
    """A model and an optimizer that can be told apart by one number."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            optimizer.state[parameter] = {
                "step": torch.tensor(value),
                "exp_avg": torch.full_like(parameter, value),
                "exp_avg_sq": torch.full_like(parameter, value),
            }


def digest(model: torch.nn.Module, optimizer: AdamW) -> str:
    """Of every bit that training goes on from."""
    total = hashlib.sha256()
    for parameter in model.parameters():
        for tensor in (parameter, *(optimizer.state[parameter][key] for key in ("step", "exp_avg", "exp_avg_sq"))):
            total.update(tensor.detach().numpy().tobytes())
    total.update(torch.get_rng_state().numpy().tobytes() + repr(random.getstate()).encode())
    return total.hexdigest()


def take_up(checkpoint: Checkpoint | None) -> tuple[Any, AdamW, int]:
    model, optimizer = build()
    if checkpoint is None:
        return model, optimizer, 0
    checkpoint.load_model_weights(model)
    checkpoint.load_optimizer(optimizer)
    checkpoint.restore_rng()
    return model, optimizer, checkpoint.step


def say(**values: object) -> None:
    os.write(1, json.dumps(values).encode() + b"\n")


# --- the lives of a child -------------------------------------------------------------------------------------------


def train_for_ever(directory: str) -> None:
    """Resume, then train and save until the end comes. Every third checkpoint is written twice."""
    store = CheckpointStore(Path(directory), notify=lambda text: say(message=text))
    model, optimizer, step = take_up(store.latest())
    while True:
        step += 1
        train(model, optimizer)
        for _ in range(2 if step % 3 == 0 else 1):
            store.save(step, model=model, optimizer=optimizer, state={"step": step})
        say(saved=step)


def train_in_one_go(steps: int) -> None:
    model, optimizer = build()
    for step in range(1, steps + 1):
        train(model, optimizer)
        say(step=step, digest=digest(model, optimizer))


def die_at(directory: str, moment: int) -> None:
    """Save, replace and protect, and be killed before the given file operation (counted from 0)."""
    model, optimizer = build()
    store = CheckpointStore(Path(directory), keep=1, notify=lambda text: say(message=text))
    left = moment

    def count(*_: object) -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    fsync = os.fsync

    def counted_fsync(descriptor: Any) -> None:
        count()
        fsync(descriptor)

    os.fsync = counted_fsync  # type: ignore[assignment]
    operations = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}
    sys.addaudithook(lambda event, _: count() if event in operations else None)
    for value in (2.0, 2.5):
        fill(model, optimizer, value)
        store.save(2, model=model, optimizer=optimizer, state={"value": value})
        say(saved=value)
    store.protect(2)
    say(saved="protected")
    say(operations=moment - left)


def nursery() -> None:
    """Read one life a line, fork a child for it, report its process id and how it ended."""
    torch.set_num_threads(1)
    lives: dict[str, Callable[..., None]] = {life.__name__: life for life in (train_for_ever, train_in_one_go, die_at)}
    model, optimizer = build()
    model.state_dict(), optimizer.state_dict()
    say(ready=True)
    for line in sys.stdin:
        life, arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                say(born=os.getpid())
                lives[life](*arguments)
                code = 0
            finally:
                sys.stderr.flush()
                if code:
                    import traceback

                    traceback.print_exc()
                os._exit(code)
        say(status=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


class Nursery:
    """The other side of `nursery`."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        assert self.hear() == {"ready": True}

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the nursery died"
        heard: dict[str, Any] = json.loads(line)
        return heard

    def begin(self, life: str, *arguments: object) -> int:
        """Start a life and return its process id."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([life, arguments]) + "\n")
        self.process.stdin.flush()
        return int(self.hear()["born"])

    def end(self) -> tuple[int, list[dict[str, Any]]]:
        """Exit code of the running life (negative: the signal), and what it said."""
        said = []
        while "status" not in (heard := self.hear()):
            said.append(heard)
        return heard["status"], said

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture(scope="module")
def home() -> Iterator[Nursery]:
    found = Nursery()
    yield found
    found.close()


# --- killed ---------------------------------------------------------------------------------------------------------


def seconds_a_save(home: Nursery, directory: Path) -> float:
    """How long a child takes for a step, so that it is killed soon enough on a fast machine and late enough on a slow one."""
    child = home.begin("train_for_ever", str(directory))
    home.hear()
    start = time.monotonic()
    for _ in range(4):
        home.hear()
    taken = (time.monotonic() - start) / 4
    os.kill(child, signal.SIGKILL)
    home.end()
    return taken


def test_killed_at_random_moments(home: Nursery, tmp_path: Path) -> None:
    """After every kill the newest checkpoint is whole, not older than the last finished save, and bitwise the right one."""
    directory = tmp_path / "run/checkpoints"
    moments = random.Random(2)
    seen: dict[int, str] = {}
    last, unfinished = 0, 0
    longest = 8 * seconds_a_save(home, tmp_path / "trial")
    for _ in range(KILLS):
        child = home.begin("train_for_ever", str(directory))
        time.sleep(moments.uniform(0.0, longest))
        os.kill(child, signal.SIGKILL)
        status, said = home.end()
        assert status == -signal.SIGKILL, said
        assert not [line for line in said if "message" in line]
        last = max([last, *(line["saved"] for line in said)])
        unfinished += any(directory.glob(".tmp-*"))
        messages: list[str] = []
        store = CheckpointStore(directory, notify=messages.append)
        found = store.latest()
        assert messages == []
        assert not [path for path in directory.glob("*") if not path.name.startswith("step-")]
        if found is None:
            assert last == 0
            continue
        assert found.step in (last, last + 1)
        assert all(store.open(other) for other in store.steps())  # the older ones are whole too
        assert found.state == {"step": found.step}
        last = found.step
        model, optimizer, step = take_up(found)
        seen[step] = digest(model, optimizer)
    assert unfinished >= 3, "the kills did not hit saves: nothing was tested"
    assert len(seen) >= 5
    home.begin("train_in_one_go", last)
    status, said = home.end()
    assert status == 0
    uninterrupted = {line["step"]: line["digest"] for line in said}
    assert seen == {step: uninterrupted[step] for step in seen}


@pytest.mark.slow
def test_killed_before_every_file_operation(home: Nursery, tmp_path: Path) -> None:
    """Sync, rename, make and remove: one life for each, over a save, a replacement and a protection."""
    start = tmp_path / "start"
    model, optimizer = build()
    fill(model, optimizer, 1.0)
    CheckpointStore(start).save(1, model=model, optimizer=optimizer, state={"value": 1.0})
    home.begin("die_at", str(shutil.copytree(start, tmp_path / "whole")), 10**6)
    status, said = home.end()
    assert status == 0
    operations = said[-1]["operations"]
    assert operations > 40
    found_values = set()
    for moment in range(operations):
        directory = shutil.copytree(start, tmp_path / f"moment-{moment}")
        home.begin("die_at", str(directory), moment)
        status, said = home.end()
        assert status == -signal.SIGKILL, (moment, said)
        order: list[object] = [1.0, 2.0, 2.5, "protected"]
        finished = [1.0, *(line["saved"] for line in said)][-1]
        messages: list[str] = []
        store = CheckpointStore(directory, keep=1, notify=messages.append)
        found = store.latest()
        assert found is not None, (moment, finished)
        assert messages == [], moment
        assert all(store.open(step) for step in store.steps()), moment  # none is half deleted
        value = found.state["value"]
        # What was finished is there, or the one that was under way.
        assert value in (order[min(order.index(finished), 2)], order[min(order.index(finished) + 1, 2)]), moment
        found.load_model_weights(model)
        found.load_optimizer(optimizer)
        for parameter in model.parameters():
            assert all((tensor == value).all() for tensor in (parameter, *optimizer.state[parameter].values())), moment
        left = sorted(path.name for path in directory.iterdir())
        assert set(left) <= {"step-000001", "step-000002", "protected.json"}, (moment, left)
        assert store.protected() in ([frozenset({2})] if finished == "protected" else [frozenset(), frozenset({2})])
        found_values.add(value)
        shutil.rmtree(directory)
    assert found_values == {1.0, 2.0, 2.5}


def test_a_reader_beside_a_writer(home: Nursery, tmp_path: Path) -> None:
    """Another process that looks while one writes sees whole checkpoints that never go back, and disturbs nothing."""
    messages: list[str] = []
    store = CheckpointStore(tmp_path, notify=messages.append)
    child = home.begin("train_for_ever", str(tmp_path))
    start = time.monotonic()
    steps: list[int] = []
    while time.monotonic() < start + 1.5 or (len(set(steps)) < 3 and time.monotonic() < start + PATIENCE):
        found = store.latest()
        steps.append(0 if found is None else found.step)
    os.kill(child, signal.SIGKILL)
    status, said = home.end()
    assert status == -signal.SIGKILL
    assert messages == []
    assert not [line for line in said if "message" in line]
    assert steps == sorted(steps)
    assert len(set(steps)) >= 3


# --- no room --------------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(path: Path, size: int) -> Iterator[None]:
    """A file system of its own, if this process may mount one."""
    path.mkdir()
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if mount is None or os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a small tmpfs here (needs root); the file-size limit below tests the same code")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk(tmp_path: Path) -> None:
    """However much room is left, as long as it is too little: the old checkpoint stays, and the error says what to do."""
    model, optimizer = build(hidden=64)
    fill(model, optimizer, 1.0)
    needed = sum(3 * parameter.nbytes + 4 for parameter in model.parameters())
    disk = tmp_path / "disk"
    with small_disk(disk, 2 << 20):
        store = CheckpointStore(disk / "checkpoints")
        store.save(1, model=model, optimizer=optimizer, state={"value": 1.0})
        store.protect(1)
        filler = disk / "filler"
        fill(model, optimizer, 2.0)
        for room in (0, 4096, 12288, 16384, needed // 4, needed // 2, needed - 4096):
            free = shutil.disk_usage(disk).free
            with filler.open("wb") as file:
                file.write(bytes(free - room))
            for step in (1, 2):
                with pytest.raises(CheckpointError, match="No space left on device") as caught:
                    store.save(step, model=model, optimizer=optimizer, state={"value": 2.0})
                free = shutil.disk_usage(disk).free
                assert f"step {step} in {store.directory}" in str(caught.value)
                assert f"about {needed:,} bytes, {free:,} are free" in str(caught.value)
                assert "free some space" in str(caught.value)
                assert sorted(path.name for path in store.directory.iterdir()) == ["protected.json", "step-000001"]
                found = store.latest()
                assert found is not None
                assert found.state == {"value": 1.0}
            if room == 0:
                with pytest.raises(CheckpointError, match=r"cannot write .*protected\.json: .*No space left"):
                    store.unprotect(1)
                assert store.protected() == {1}
            filler.unlink()
        assert store.protected() == {1}
        store.save(2, model=model, optimizer=optimizer, state={"value": 2.0})
        found = store.latest()
        assert found is not None
        assert found.step == 2


def test_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    """Checkpoints can be read where nothing can be changed; a damaged one is skipped where it is."""
    model, optimizer = build()
    fill(model, optimizer, 1.0)
    disk = tmp_path / "disk"
    with small_disk(disk, 2 << 20):
        store = CheckpointStore(disk)
        for step in (1, 2):
            path = store.save(step, model=model, optimizer=optimizer, state={"step": step})
        (disk / ".tmp-step-000003-4194304999").mkdir()  # no process has such an id
        with (path / "optimizer.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x7f")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        messages: list[str] = []
        store = CheckpointStore(disk, notify=messages.append)
        found = store.latest()
        assert found is not None
        assert found.step == 1
        assert any("skipped; moving it aside failed: [Errno 30]" in text for text in messages)
        assert any("cannot clear the unfinished checkpoint" in text for text in messages)
        with pytest.raises(CheckpointError, match=r"Read-only file system.*on a disk that can be written"):
            store.save(3, model=model, optimizer=optimizer, state={})


def test_a_limit_on_file_sizes(tmp_path: Path) -> None:
    model, optimizer = build(hidden=64)
    fill(model, optimizer, 1.0)
    store = CheckpointStore(tmp_path)
    store.save(1, model=model, optimizer=optimizer, state={"value": 1.0})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (1, 1000, 20_000, 100_000):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))  # Python ignores the signal that comes with it
            with pytest.raises(CheckpointError) as caught:
                store.save(2, model=model, optimizer=optimizer, state={"value": 2.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert os.strerror(errno.EFBIG) in str(caught.value)
        assert "ulimit -f" in str(caught.value)
        assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    found = store.latest()
    assert found is not None
    assert found.state == {"value": 1.0}
    assert store.save(2, model=model, optimizer=optimizer, state={}).name == "step-000002"


if __name__ == "__main__":
    nursery()
