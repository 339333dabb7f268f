"""`iwopd serve-teacher` as a real process, and training with it: the same as with a local teacher, whatever happens to it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from iwopd.cli import main
from iwopd.config import make_config
from iwopd.config.engines import TeacherSource
from iwopd.errors import UserError
from iwopd.models import load_model
from iwopd.runs.directory import RunDirectory
from iwopd.teacher.checks import check_server
from iwopd.teacher.errors import TeacherError
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.server import ServerScorer
from iwopd.train.run import run_training
from iwopd.types import Prompt, Rollout
from models import make_model, save_pair
from waiting import PATIENCE, wait_until

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
STEPS = 4


class Processes:
    """Started processes, ended with the test."""

    def __init__(self) -> None:
        self.all: list[subprocess.Popen[str]] = []

    def start(
        self, *words: str | Path, launcher: tuple[str, ...] = ("-m", "iwopd"), **environment: str
    ) -> subprocess.Popen[str]:
        command = [sys.executable, *launcher, *(str(word) for word in words)]
        given = {**ENVIRONMENT, **environment}
        process = subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.all.append(process)
        return process

    def serve(self, model: str | Path, *words: str, **environment: str) -> tuple[subprocess.Popen[str], str]:
        """A server, up and listening, and its URL."""
        given = ["--port", "0"] if "--port" not in words else []
        process = self.start("serve-teacher", model, "--threads", "1", *given, *words, **environment)
        assert process.stdout is not None
        found, said = None, ""
        while found is None and (line := process.stdout.readline()):
            said += line
            found = re.search(r"at (http://\S+) ", line)
        assert found, said
        return process, found[1]

    def end(self) -> None:
        for process in self.all:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.end()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two teachers, prompts that name them, and answers that a teacher may see."""
    folder = tmp_path_factory.mktemp("pair")
    settings = save_pair(folder)
    make_model("qwen3", hidden=16, seed=5).save_pretrained(folder / "other")
    lines = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        line["answer"] = str(number % 10)
        line["teacher"] = "other" if number % 3 == 0 else None
    (folder / "routed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {**settings, "steps": STEPS, "tracking": {"console": "off"}}


@pytest.fixture(scope="module")
def server(pair: dict[str, Any]) -> Iterator[str]:
    started = Processes()
    yield started.serve(pair["models"]["teacher"])[1]
    started.end()


def trained(settings: dict[str, Any], folder: Path, **change: Any) -> Path:
    run_training(make_config({**settings, **change}), folder)
    return folder


def weights(folder: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(folder / "checkpoints" / f"step-{step:06d}" / "model" / "model.safetensors")
    return tensors


def assert_same_training(one: Path, other: Path, start: Path | None = None) -> None:
    """Equal rollouts in every step, and weights equal to 1e-5 where training has moved them by far more."""
    first, second = (list(RunDirectory(folder).read("metrics.jsonl")) for folder in (one, other))
    assert [record["step"] for record in first] == [record["step"] for record in second] == list(range(1, STEPS + 1))
    for ours, theirs in zip(first, second, strict=True):
        assert (ours["tokens"], ours["rollout/length_mean"]) == (theirs["tokens"], theirs["rollout/length_mean"])
        assert ours["kl/sampled"] == pytest.approx(theirs["kl/sampled"], abs=1e-5)
    after, others = weights(one), weights(other)
    assert max(float((after[name] - others[name]).abs().max()) for name in after) < 1e-5
    if start is not None:
        before = load_file(start / "model.safetensors")
        assert max(float((after[name] - before[name]).abs().max()) for name in after) > 1e-3


@pytest.fixture(scope="module")
def local(pair: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(pair, tmp_path_factory.mktemp("local") / "run")


# --- the server ------------------------------------------------------------------------------------------------------


def rollouts(count: int) -> list[Rollout]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for n in range(count):
        ids = torch.randint(21, (3 + n % 17,), generator=generator)
        made.append(Rollout(Prompt(str(n), tuple(range(1, 4 + n % 5))), ids, torch.zeros(len(ids)), "length"))
    return made


def test_it_scores_what_a_local_model_scores(server: str, pair: dict[str, Any]) -> None:
    asked = rollouts(60)
    remote = ServerScorer(TeacherSource(urls=[server], tokens_per_request=50))
    check_server(remote, vocab_size=21, longest=255, examples=[(1, 2, 3), (4,)])
    assert remote.model == pair["models"]["teacher"]
    here = LocalScorer(load_model(pair["models"]["teacher"]), vocab_size=21)
    for ours, theirs in zip(remote.score(asked), here.score(asked), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    with pytest.raises(TeacherError, match="takes 256 tokens"):
        check_server(remote, vocab_size=21, longest=256, examples=[])
    with pytest.raises(TeacherError, match="has 21 ids, the tokenizer that it is asked with 22"):
        check_server(remote, vocab_size=22, longest=9, examples=[])


OWN_TOKENIZER = """
from transformers import PreTrainedTokenizer


class OwnTokenizer(PreTrainedTokenizer):
    def __init__(self, **settings):
        self.ids = {f"<{number}>": number for number in range(21)}
        super().__init__(**settings)

    @property
    def vocab_size(self):
        return len(self.ids)

    def get_vocab(self):
        return dict(self.ids)
"""


@pytest.fixture
def padded(tmp_path: Path) -> Path:
    """A model with 32 output rows and a tokenizer of 21 ids, whose code comes with it."""
    make_model("llama", vocab=32, seed=3).save_pretrained(tmp_path / "padded")
    (tmp_path / "padded" / "own_tokenizer.py").write_text(OWN_TOKENIZER)
    about = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own_tokenizer.OwnTokenizer", None]}}
    (tmp_path / "padded" / "tokenizer_config.json").write_text(json.dumps(about))
    return tmp_path / "padded"


def test_padding_rows_have_no_share_in_the_softmax(padded: Path, processes: Processes, tmp_path: Path) -> None:
    """A tokenizer of the repository's own code says how many ids are real."""
    asked = rollouts(20)
    _, url = processes.serve(padded, "--trust-remote-code", HF_MODULES_CACHE=str(tmp_path / "modules"))
    remote = ServerScorer(TeacherSource(urls=[url]))
    check_server(remote, vocab_size=21, longest=20, examples=[(1, 2, 3)])
    model = load_model(padded)
    here, with_padding = LocalScorer(model, vocab_size=21).score(asked), LocalScorer(model).score(asked)
    for ours, theirs, wrong in zip(remote.score(asked), here, with_padding, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
        assert not torch.allclose(ours, wrong, atol=1e-2)


def test_a_tokenizer_that_cannot_be_read_is_not_passed_over(padded: Path, processes: Processes) -> None:
    process = processes.start("serve-teacher", padded, "--port", "0")
    text = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 2
    assert re.search(r"cannot load a tokenizer from .*--trust-remote-code.*--vocab-size", text, re.DOTALL)
    asked = rollouts(5)
    _, url = processes.serve(padded, "--vocab-size", "21")
    here = LocalScorer(load_model(padded), vocab_size=21).score(asked)
    for ours, theirs in zip(ServerScorer(TeacherSource(urls=[url])).score(asked), here, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def status(url: str, *, token: str | None = None, data: bytes | None = None) -> int:
    request = urllib.request.Request(url, data=data)
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return int(error.code)


def test_rubbish_does_not_bring_it_down(server: str) -> None:
    assert status(f"{server}/health") == 200
    assert status(f"{server}/v1/nothing") == 404
    for rubbish in (b"", b"{", b"[" * 100_000, b"null", b'{"prompt": [1e999], "max_tokens": 1}'):
        assert status(f"{server}/v1/completions", data=rubbish) == 400
    host, port = server.removeprefix("http://").split(":")
    for words in (b"\0\xff\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            connection.sendall(words)
            assert re.search(rb" 4\d\d |Error response", connection.recv(200))
    assert status(f"{server}/health") == 200


def test_with_a_token_nobody_else_is_served(
    processes: Processes, pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, url = processes.serve(pair["models"]["teacher"], "--host", "0.0.0.0", "--name", "big", IWOPD_SERVER_TOKEN="s3cret")
    url = url.replace("0.0.0.0", "127.0.0.1")
    assert status(f"{url}/health") == 200
    assert status(f"{url}/v1/models") == 401
    assert status(f"{url}/v1/models", token="wrong") == 401
    assert status(f"{url}/v1/models", token="s3cret") == 200
    monkeypatch.setenv("TEACHER_KEY", "s3cret")
    asked = rollouts(3)
    assert len(ServerScorer(TeacherSource(urls=[url], name="big", api_key_env="TEACHER_KEY")).score(asked)) == 3
    with pytest.raises(TeacherError, match="HTTP 401"):
        ServerScorer(TeacherSource(urls=[url])).score(asked)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=PATIENCE) == 0


def test_what_cannot_be_served_ends_with_one_line(
    pair: dict[str, Any], server: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("IWOPD_SERVER_TOKEN", raising=False)
    port = server.rpartition(":")[2]
    for words, message in (
        (["--host", "0.0.0.0"], "put a secret into"),
        (["--port", port], f"cannot listen on 127.0.0.1:{port}"),
        (["--port", "70000"], "--port must lie between"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["serve-teacher", pair["models"]["teacher"], *words])
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


# --- training --------------------------------------------------------------------------------------------------------


def test_training_with_a_server_is_training_with_a_local_teacher(
    pair: dict[str, Any], server: str, local: Path, tmp_path: Path
) -> None:
    remote = trained(pair, tmp_path / "run", teacher={"urls": [server], "tokens_per_request": 100})
    assert_same_training(remote, local, start=Path(pair["models"]["student"]))


@pytest.mark.parametrize(
    "method",
    [
        {"divergence": "reverse-kl", "support": "full"},
        {"divergence": "forward-kl", "support": "top-k", "k": 4, "support_of": "teacher"},
        {"divergence": "jsd", "support": "top-k", "k": 4, "support_of": "union"},
    ],
    ids=lambda method: f"{method['divergence']} {method['support']}",
)
def test_distributions_of_a_server_train_as_those_of_a_local_teacher(
    method: dict[str, Any], pair: dict[str, Any], server: str, tmp_path: Path
) -> None:
    """With one step of Adam after the other, float16 states leave the weights equal to 1e-3 of what training moves them."""
    chosen = {"method": {"objective": "divergence", **method}}
    here = trained(pair, tmp_path / "here", **chosen)
    away = trained(pair, tmp_path / "away", **chosen, teacher={"urls": [server], "dialect": "iwopd", "tokens_per_request": 100})
    before, after, others = load_file(Path(pair["models"]["student"]) / "model.safetensors"), weights(here), weights(away)
    moved = torch.cat([(after[name] - before[name]).flatten() for name in after])
    apart = torch.cat([(after[name] - others[name]).flatten() for name in after])
    assert float(moved.abs().max()) > 1e-3
    assert float(apart.norm()) < (1e-2 if method["support"] == "full" else 1e-4) * float(moved.norm())


def test_what_a_server_cannot_give_is_refused_before_training(pair: dict[str, Any], server: str, tmp_path: Path) -> None:
    method = {"objective": "divergence", "divergence": "forward-kl", "support": "top-k", "k": 4}
    with pytest.raises(UserError, match=r"teacher\.dialect is 'vllm'.*hidden states"):
        make_config({**pair, "method": {"objective": "divergence"}, "teacher": {"urls": [server]}})
    with pytest.raises(UserError, match=r"prompt_logprobs is 4.*teacher\.dialect = 'iwopd'"):
        trained(pair, tmp_path / "run", method=method, teacher={"urls": [server]})


def test_the_doctor_tries_every_replica(pair: dict[str, Any], server: str, processes: Processes, tmp_path: Path) -> None:
    """One of two replicas serves another model: half of the scores would be wrong."""
    folder = Path(pair["models"]["teacher"]).parent
    _, wrong = processes.serve(folder / "other", "--name", pair["models"]["teacher"])
    _, right = processes.serve(pair["models"]["teacher"])
    with pytest.raises(UserError, match=rf"teacher \({wrong}\) differs from teacher \({server}\)"):
        trained(pair, tmp_path / "wrong", teacher={"urls": [server, wrong]})
    trained(pair, tmp_path / "right", teacher={"urls": [server, right]})


def test_overlap_changes_nothing(pair: dict[str, Any], local: Path, tmp_path: Path) -> None:
    rollout = {**pair["rollout"], "overlap": True}
    assert_same_training(trained(pair, tmp_path / "run", rollout=rollout), local)


def test_overlap_with_samples_and_dropped_rollouts(pair: dict[str, Any], server: str, tmp_path: Path) -> None:
    rollout = {**pair["rollout"], "prompts_per_step": 6, "samples": 3, "truncated": "drop"}
    alone = trained(pair, tmp_path / "alone", rollout=rollout)
    both = trained(pair, tmp_path / "both", rollout={**rollout, "overlap": True}, teacher={"urls": [server]})
    records = list(RunDirectory(alone).read("metrics.jsonl"))
    assert any(record["rollout/truncated"] > 0 for record in records)
    assert_same_training(both, alone)


def test_teachers_here_and_there_by_the_prompts_field(pair: dict[str, Any], server: str, tmp_path: Path) -> None:
    folder = Path(pair["models"]["teacher"]).parent
    given = {**pair, "data": {"prompts": str(folder / "routed.jsonl")}}
    other = {"other": {"model": str(folder / "other")}}
    here = trained(given, tmp_path / "here", teacher={"others": other})
    mixed = trained(given, tmp_path / "mixed", teacher={"urls": [server], "others": other})
    assert_same_training(mixed, here)
    one = trained(given, tmp_path / "one", teacher={"others": {"other": {"model": pair["models"]["teacher"]}}})
    kl = [next(iter(RunDirectory(run).read("metrics.jsonl")))["kl/sampled"] for run in (here, one)]
    assert abs(kl[0] - kl[1]) > 0.01  # the other teacher does say something else
    with pytest.raises(TeacherError, match="asks for the teacher 'other', but there are: none by name"):
        trained(given, tmp_path / "none")


def test_self_distillation_with_the_answer_in_the_teachers_prompt(pair: dict[str, Any], server: str, tmp_path: Path) -> None:
    folder = Path(pair["models"]["teacher"]).parent
    given = {**pair, "data": {"prompts": str(folder / "routed.jsonl")}}
    others = {"other": {"model": str(folder / "other")}}
    own = {"user": "{answer}={prompt}", "others": others}
    here = trained(given, tmp_path / "here", teacher=own)
    there = trained(given, tmp_path / "there", teacher={**own, "urls": [server]})
    assert_same_training(there, here)
    plain = trained(given, tmp_path / "plain", teacher={"others": others})
    kl = [next(iter(RunDirectory(run).read("metrics.jsonl")))["kl/sampled"] for run in (here, plain)]
    assert abs(kl[0] - kl[1]) > 1e-3  # what it sees does change what it says


def recipe(folder: Path, settings: dict[str, Any], **change: Any) -> Path:
    path = folder / "recipe.toml"
    path.write_text(tomli_w.dumps({**settings, "tracking": {"console": "plain"}, **change}))
    return path


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    def reached() -> bool:
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        return (folder / "metrics.jsonl").exists() and len(list(RunDirectory(folder).read("metrics.jsonl"))) >= step

    wait_until(reached, f"step {step}")


@pytest.mark.slow
def test_a_server_that_is_away_delays_the_run(pair: dict[str, Any], local: Path, tmp_path: Path, processes: Processes) -> None:
    """Killed in mid-run, started again five seconds later."""
    teacher = pair["models"]["teacher"]
    serving, url = processes.serve(teacher)
    training = processes.start("train", recipe(tmp_path, pair, teacher={"urls": [url]}), "--out", tmp_path / "run")
    wait_for_step(tmp_path / "run", 1, training)
    serving.kill()
    serving.wait()
    time.sleep(5)
    assert training.poll() is None
    assert len(list(RunDirectory(tmp_path / "run").read("metrics.jsonl"))) < STEPS
    processes.serve(teacher, "--port", url.rpartition(":")[2])
    said, _ = training.communicate(timeout=PATIENCE)
    assert training.returncode == 0, said
    assert "does not answer" in said
    assert "answers again" in said
    assert_same_training(tmp_path / "run", local)


@pytest.mark.slow
def test_a_server_that_is_gone_ends_the_run_with_a_checkpoint(
    pair: dict[str, Any], local: Path, tmp_path: Path, processes: Processes
) -> None:
    """Checkpoints are far apart, so the one of the last finished step is made because of the loss; another server goes on."""
    teacher = pair["models"]["teacher"]
    serving, url = processes.serve(teacher)
    made = recipe(tmp_path, pair, teacher={"urls": [url], "patience": 2.0}, checkpoint={"every": 50})
    training = processes.start("train", made, "--out", tmp_path / "run")
    wait_for_step(tmp_path / "run", 2, training)
    serving.kill()
    said, _ = training.communicate(timeout=PATIENCE)
    done = len(list(RunDirectory(tmp_path / "run").read("metrics.jsonl")))
    assert 2 <= done < STEPS
    assert training.returncode == 1, said
    assert "did not answer for 2 s (teacher.patience)" in said
    assert f"Step {done} was the last finished one and is saved; continue with --resume" in said
    assert "Traceback" not in said
    assert (tmp_path / "run" / "checkpoints" / f"step-{done:06d}" / "manifest.json").exists()
    _, another = processes.serve(teacher)
    resumed = processes.start("train", tmp_path / "run", "--resume", "--teacher.urls", f"['{another}']")
    said, _ = resumed.communicate(timeout=PATIENCE)
    assert resumed.returncode == 0, said
    assert_same_training(tmp_path / "run", local)


@pytest.mark.slow
def test_two_ranks_overlap_with_a_server_and_lose_it_together(
    pair: dict[str, Any], local: Path, tmp_path: Path, processes: Processes
) -> None:
    teacher = pair["models"]["teacher"]
    serving, url = processes.serve(teacher)
    two = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "iwopd")
    made = recipe(tmp_path, pair, teacher={"urls": [url], "patience": 2.0})
    both = processes.start("train", made, "--out", tmp_path / "run", launcher=two)
    said, _ = both.communicate(timeout=PATIENCE)
    assert both.returncode == 0, said
    assert_same_training(tmp_path / "run", local)
    longer = processes.start("train", tmp_path / "run", "--resume", "--steps", "60", launcher=two)
    wait_for_step(tmp_path / "run", STEPS + 1, longer)
    serving.kill()
    said, _ = longer.communicate(timeout=PATIENCE)
    done = len(list(RunDirectory(tmp_path / "run").read("metrics.jsonl")))
    assert longer.returncode != 0
    assert f"Step {done} was the last finished one and is saved" in said
    assert (tmp_path / "run" / "checkpoints" / f"step-{done:06d}" / "manifest.json").exists()
