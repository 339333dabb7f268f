"""The engine `vllm` without vLLM: what it asks for and in which order, what it makes of faults, one engine for each rank."""

from __future__ import annotations

import importlib
import os
import sys
import time
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from iwopd.config import make_config
from iwopd.rollout.engine import Student
from iwopd.rollout.guests import trainers_own
from iwopd.rollout.sampling import SamplingSettings
from iwopd.rollout.settings import VllmSettings
from iwopd.rollout.vllm import VllmEngine, VllmError
from iwopd.rollout.weights import checkpoint_weights
from iwopd.tiny.tokenizer import build_tokenizer
from iwopd.train.assembly import _open_engine as open_engine
from iwopd.train.memory.run import RunShape
from iwopd.train.ranks import Ranks
from iwopd.types import Prompt
from models import make_model

PROMPT = Prompt("p", (2, 3))


class FakeGpuEngine:
    """Stands for vLLM on a GPU, which this machine does not have: it only writes down what it is asked."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.asked: list[str] = []
        self.llm_engine = self.engine_core = self

    def shutdown(self) -> None:
        self.asked.append("shutdown")

    def collective_rpc(self, method: str, kwargs: Any) -> None:
        kinds = {
            "weights_iterator": lambda value: f"from {len(list(value))} tensors",
            "weights_path": lambda value: "from a folder",
            "overrides": lambda value: f"of {value['load_config']['load_format']}",
        }
        self.asked.append(f"{method} {next(kinds[name](value) for name, value in kwargs.items())}")

    def reset_prefix_cache(self) -> bool:
        self.asked.append("reset_prefix_cache")
        return True

    def sleep(self, level: int) -> None:
        self.asked.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.asked.append(f"wake {tags[0]}")

    # Requests: one is finished with each step, the last one first; the first token is the last one of the prompt.

    waiting: ClassVar[dict[str, Any]] = {}

    def add_request(self, number: str, prompt: Any, parameters: Any) -> None:
        first, limit = prompt["prompt_token_ids"][-1], parameters["max_tokens"]
        assert parameters["detokenize"] is False
        whole = SimpleNamespace(
            token_ids=[first] * limit,
            logprobs=[{first: SimpleNamespace(logprob=-0.5)}] * limit,
            finish_reason="length",
        )
        (self.telling if parameters["output_kind"] == "delta" else self.waiting)[number] = whole

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    telling: ClassVar[dict[str, Any]] = {}
    """Requests that tell of every token: with each step one more of all of them."""

    def step(self) -> list[Any]:
        if self.telling:
            return [self._next(number) for number in list(self.telling)]
        number, output = self.waiting.popitem()
        return [SimpleNamespace(request_id=number, outputs=[output])]

    def _next(self, number: str) -> Any:
        left = self.telling[number]
        last = len(left.token_ids) == 1
        part = SimpleNamespace(
            token_ids=[left.token_ids.pop()], logprobs=[left.logprobs.pop()], finish_reason="length" if last else None
        )
        if last:
            del self.telling[number]
        return SimpleNamespace(request_id=number, outputs=[part], finished=last)

    def abort_request(self, numbers: list[str]) -> None:
        self.asked.append(f"abort {numbers}")
        self.waiting.clear()
        for number in numbers:
            self.telling.pop(number, None)


def student(model: Any, **more: Any) -> Student:
    return Student(lambda: model, vocab_size=21, rows=21, longest=64, **more)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def fake(name: str, *package: str) -> Any:
        kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY="final", DELTA="delta"))
        vllm = SimpleNamespace(LLM=FakeGpuEngine, SamplingParams=dict, sampling_params=kinds)
        return vllm if name == "vllm" else real(name, *package)

    monkeypatch.setattr("iwopd.rollout.vllm.importlib.import_module", fake)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


def test_a_sleeping_engine_gets_weights_before_its_cache(fake_gpu: None) -> None:
    """A mock: there is no GPU here. Level 2 forgets the weights, so they must come at every waking, changed or not."""
    model = make_model("qwen3")
    engine = VllmEngine(student(model), VllmSettings(sleep=True))
    assert engine.llm.arguments["enable_sleep_mode"]
    count = len(dict(checkpoint_weights(model)))
    first = [f"reload_weights from {count} tensors", "reset_prefix_cache"]
    engine.update_weights()
    engine._rest()
    engine._rest()
    assert engine.llm.asked == [*first, "sleep 2"]
    engine.update_weights()
    engine.update_weights()
    assert engine.llm.asked == [*first, "sleep 2", "wake weights", *first, "wake kv_cache"]
    engine.close()


def test_an_engine_that_stays_awake_syncs_changes_only(fake_gpu: None) -> None:
    """A mock: there is no GPU here."""
    model = make_model("qwen3")
    engine = VllmEngine(student(model), VllmSettings(tensor_parallel=2))
    for _ in range(2):
        engine.update_weights()
        engine._rest()
    started = ["update_config of safetensors"]  # it starts with made-up weights, whose loader reads no files
    assert engine.llm.asked == [*started, "reload_weights from a folder", "reset_prefix_cache"]
    with torch.no_grad():
        model.model.norm.weight += 1
    engine.update_weights()
    assert engine.llm.asked.count("reload_weights from a folder") == 2
    engine.close()


def test_requests_to_vllm_come_back_as_rollouts(fake_gpu: None) -> None:
    """A mock: there is no GPU here. Answers come in any order; one that fails takes the others back."""
    engine = VllmEngine(student(make_model("qwen3")), VllmSettings(sleep=True))
    sampler = engine.sampler(SamplingSettings(3))
    prompts = [Prompt("a", (2, 5)), Prompt("b", (3, 6))]
    heard: list[int] = []
    rollouts = sampler.sample(
        prompts, seed=0, step=1, samples=2, max_tokens=[1, 3], finished=lambda place, rollout: heard.append(place)
    )
    assert [rollout.response_ids.tolist() for rollout in rollouts] == [[5], [5], [6, 6, 6], [6, 6, 6]]
    assert [(rollout.prompt.id, rollout.sample) for rollout in rollouts] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert rollouts[3].rollout_logprobs.tolist() == [-0.5] * 3
    assert heard == [3, 2, 1, 0]
    assert engine.llm.asked[-1] == "sleep 2"

    def fail(place: int, rollout: Any) -> None:
        raise ArithmeticError("the teacher is gone")

    with pytest.raises(ArithmeticError):
        sampler.sample(prompts, seed=0, step=1, finished=fail)
    assert engine.llm.asked[-1] == "abort ['0']"
    assert (sampler.context, sampler.vocab_size) == (64, 21)
    engine.close()


class Watch:
    """Stops one answer at its first look; `wait` is what the look waits for."""

    room = 2**31

    def __init__(self, stopped: int | None, wait: Any = lambda: None) -> None:
        self.stopped, self.wait = stopped, wait
        self.seen: list[tuple[int, int, bool]] = []

    def next_look(self, length: int) -> int:
        return length // 4 * 4 + 4

    def look(self, pieces: Any) -> list[bool]:
        self.wait()
        self.seen += [(piece.row, len(piece.ids), piece.ended) for piece in pieces]
        return [piece.row == self.stopped for piece in pieces]


def test_answers_that_are_stopped_are_aborted(fake_gpu: None) -> None:
    """A mock: there is no GPU here. vLLM is asked for every token, and never writes further than to the look after the next."""
    engine = VllmEngine(student(make_model("qwen3")), VllmSettings(sleep=True))
    sampler = engine.sampler(SamplingSettings(20))
    prompts = [Prompt("a", (2, 5)), Prompt("b", (3, 6)), Prompt("c", (3, 7))]
    watch = Watch(1, wait=lambda: time.sleep(0.2))
    rollouts = sampler.sample(prompts, seed=0, step=1, max_tokens=[20, 20, 6], watcher=watch)
    assert [len(rollout) for rollout in rollouts] == [20, 4, 6]
    assert [rollout.stop_reason for rollout in rollouts] == ["length", "horizon", "length"]
    assert sorted(watch.seen) == sorted([(0, 4, False)] * 4 + [(0, 4, True), (1, 4, False), (2, 4, False), (2, 2, True)])
    assert engine.llm.asked[-2:] == ["abort ['1']", "sleep 2"]
    assert sampler.overrun <= 4
    assert not engine.llm.telling

    def fail() -> None:
        raise ArithmeticError("the teacher is gone")

    with pytest.raises(ArithmeticError):
        sampler.sample(prompts, seed=0, step=1, watcher=Watch(1, wait=fail))
    assert engine.llm.asked[-1] == "abort ['0', '1', '2']"
    assert not engine.llm.telling
    engine.close()


def test_each_rank_has_an_engine_on_its_own_gpu(fake_gpu: None) -> None:
    """A mock: there is no GPU here. vLLM's external launcher takes the rank's process group and device."""
    alone = VllmEngine(student(make_model("qwen3")), VllmSettings())
    assert "distributed_executor_backend" not in alone.llm.arguments
    engine = VllmEngine(student(make_model("qwen3"), rank=1, ranks=2), VllmSettings(sleep=True))
    assert engine.llm.arguments["distributed_executor_backend"] == "external_launcher"
    assert engine.sampler(SamplingSettings(3)).sample([], seed=0, step=1) == []
    assert engine.llm.asked == []  # without prompts it is not even woken
    with pytest.raises(VllmError, match=r"engine\.vllm\.tensor_parallel is 2, but each of the 2 training processes"):
        VllmEngine(student(make_model("qwen3"), ranks=2), VllmSettings(tensor_parallel=2))
    for opened in (alone, engine):
        opened.close()


def test_faults_of_vllm_are_told_in_words(fake_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mock: there is no GPU here. Other ranks hear of an `EngineError`, and finished steps are kept."""
    engine = VllmEngine(student(make_model("qwen3")), VllmSettings())

    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    sampler = engine.sampler(SamplingSettings(3))
    for method, doing in (("step", "writing"), ("add_request", "taking prompts"), ("collective_rpc", "taking new weights")):
        engine._synced = None
        with monkeypatch.context() as patch:
            patch.setattr(FakeGpuEngine, method, fail)
            with pytest.raises(VllmError, match=f"vLLM failed while {doing}: OutOfMemoryError: no room"):
                sampler.sample([PROMPT], seed=0, step=1)
    engine.close()


@pytest.mark.parametrize(
    ("precision", "dtype", "own", "expected"),
    [
        ("bf16", "float32", None, "bfloat16"),
        ("no", "float32", None, "float32"),
        ("no", "float16", None, "float16"),
        ("bf16", "float32", "float32", "float32"),
    ],
)
def test_an_engine_computes_as_the_run_does(fake_gpu: None, precision: str, dtype: str, own: str | None, expected: str) -> None:
    """A mock: there is no GPU here. An empty `engine.vllm.dtype` follows `precision`, and so does the planned memory."""
    engines = {"rollout": {"engine": "vllm"}, "engine": {"vllm": {"dtype": own} if own else {}}}
    config = make_config({"models": {"world": "clean", "dtype": dtype}, "precision": precision, **engines})
    engine: Any = open_engine(config, make_model("qwen3"), build_tokenizer(), 64, Ranks())
    assert (engine.dtype, engine.llm.arguments["dtype"]) == (expected, expected)
    shape = RunShape(config=config, student=None, teachers={}, reference=None, longest=64)
    assert {shape.writing_bytes(trainer) for trainer in ("local", "verl")} == {4 if expected == "float32" else 2}
    engine.close()


def test_a_guest_leaves_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM does to its process when it starts and ends, and whose process group it may destroy."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    destroyed: list[Any] = []
    monkeypatch.setattr("torch.distributed.destroy_process_group", destroyed.append)
    setter, count, precision = torch.set_num_threads, torch.get_num_threads(), torch.get_float32_matmul_precision()
    for keep in (True, False):
        with trainers_own(keep_group=keep):
            torch.set_num_threads = lambda nthreads: None
            torch.set_float32_matmul_precision("medium")
            os.environ |= {"LOCAL_WORLD_SIZE": "1", "LD_PRELOAD": "libtcmalloc.so"}
            for which in ("its own", None):
                torch.distributed.destroy_process_group(which)
    assert destroyed == ["its own", "its own", None]
    assert (torch.set_num_threads, torch.get_num_threads()) == (setter, count)
    assert torch.get_float32_matmul_precision() == precision
    assert (os.environ["LOCAL_WORLD_SIZE"], "LD_PRELOAD" in os.environ) == ("2", False)


def test_without_vllm_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # so that it is missing in its own environment, too
    with pytest.raises(VllmError, match=r"pip install 'iwopd\[vllm\]'"):
        VllmEngine(student(make_model("qwen3")), VllmSettings())
