"""vLLM in this process, with a copy of the student's weights.

The engine is built from the student's config alone and gets all its weights from the student, before the first rollout and
after every update. vLLM is an extra (`iwopd[vllm]`) and imported when an engine is opened.

Where several processes train together, each has an engine of its own on its own GPU, and all have the same weights: nothing
travels between them. vLLM calls that its external launcher: it takes the process group and the device that are there.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from iwopd.model_facts import context_length
from iwopd.rollout.engine import EngineError, Student
from iwopd.rollout.guests import trainers_own
from iwopd.rollout.requests import RequestEngine
from iwopd.rollout.sampler import UNLIMITED
from iwopd.rollout.settings import VllmSettings
from iwopd.rollout.streaming import Answer, Inbox, Stream
from iwopd.rollout.weights import checkpoint_weights, plain_config, save_weights, weights_version

INSTALL = "pip install 'iwopd[vllm]', in an environment of its own (docs/vllm.md), or use the engine 'local'"


class VllmError(EngineError):
    """vLLM that is not there or does not start, with the reason."""


class VllmEngine(RequestEngine):
    """One vLLM with the weights of the student."""

    settings_type = VllmSettings
    several_ranks = True

    @classmethod
    def check_here(cls) -> None:
        if "vllm" not in sys.modules and importlib.util.find_spec("vllm") is None:
            raise VllmError(f"the engine 'vllm' needs vLLM, which is not installed: {INSTALL}")

    def __init__(self, student: Student, settings: VllmSettings) -> None:
        """Start vLLM; with several GPUs (tensor parallel) it has processes of its own, and weights travel through files."""
        super().__init__(student, settings)
        if student.ranks > 1 and settings.tensor_parallel > 1:
            raise VllmError(
                f"engine.vllm.tensor_parallel is {settings.tensor_parallel}, but each of the {student.ranks} training "
                "processes has an engine on its own GPU: set it to 1, start one process, or set rollout.engine = 'server'"
            )
        most = context_length(student.model.config) or UNLIMITED
        self.context: int = min(settings.max_model_len or student.longest or most, most)
        self._asleep = False
        self._joins = torch.distributed.is_initialized()  # a process group that is not its own
        self._folder = tempfile.TemporaryDirectory(prefix="iwopd-vllm-", ignore_cleanup_errors=True)
        self._on_cpu = not torch.cuda.is_available()
        # vLLM 0.32 on a CPU packs an output matrix that is the embedding when it starts, and leaves it as it was when weights
        # are reloaded: there the engine gets one of its own.
        plain_config(student.model, untied=self._on_cpu).save_pretrained(self._folder.name)
        try:
            self.llm = self._start()
        except BaseException:
            self._folder.cleanup()
            raise

    def _start(self) -> Any:
        settings = self.settings
        if settings.sleep and self._on_cpu:
            raise VllmError("engine.vllm.sleep frees GPU memory, and there is no GPU here: leave it out")
        # In this process, so that weights need no copy on their way; and quiet, because the console is the run's.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        cache_gb = settings.cache_gb or (1.0 if self._on_cpu else None)
        arguments: dict[str, Any] = {
            "model": self._folder.name,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "dtype": self.dtype,
            "max_model_len": self.context,
            "gpu_memory_utilization": settings.memory_share,
            "kv_cache_memory_bytes": None if cache_gb is None else int(cache_gb * 2**30),
            "tensor_parallel_size": settings.tensor_parallel,
            "enforce_eager": settings.eager,
            "enable_prefix_caching": True,
            "enable_sleep_mode": settings.sleep,
            "seed": self.student.seed,
            "disable_log_stats": True,
        }
        if self.student.ranks > 1:
            arguments["distributed_executor_backend"] = "external_launcher"
        try:
            with trainers_own(keep_group=self._joins):
                llm = importlib.import_module("vllm").LLM(**arguments)
            if settings.tensor_parallel > 1:  # the loader of made-up weights, with which it started, reads no files
                llm.collective_rpc("update_config", kwargs={"overrides": {"load_config": {"load_format": "safetensors"}}})
            return llm
        except (ImportError, AttributeError) as error:
            raise VllmError(f"the engine 'vllm' needs vLLM, which cannot be imported ({error}): {INSTALL}") from None
        except (ValueError, RuntimeError, NotImplementedError, AssertionError) as error:
            of = f" of training process {self.student.rank}" if self.student.ranks > 1 else ""
            raise VllmError(f"vLLM{of} does not start with this student: {error}") from error

    def update_weights(self) -> None:
        """Wake vLLM if it sleeps, and hand it the student's weights if they have changed."""
        with _in_words("taking new weights"):
            if self._asleep:
                self.llm.wake_up(tags=["weights"])
            if self._asleep or self._synced != weights_version(self.student.model):
                self._sync()
            if self._asleep:
                self.llm.wake_up(tags=["kv_cache"])
                self._asleep = False

    def answers(self, requests: Sequence[dict[str, Any]]) -> Generator[tuple[int, Answer], None, None]:
        core = self.llm.llm_engine
        waiting = {str(number) for number in range(len(requests))}
        try:
            for number, request in enumerate(requests):
                self._add(number, request, "FINAL_ONLY")
            while core.has_unfinished_requests():
                for result in self._step():
                    waiting.discard(result.request_id)
                    yield int(result.request_id), _read(result.outputs[0])
        finally:
            if waiting:  # whoever asked has failed: the next ones must not get these answers
                core.abort_request(sorted(waiting))
        self._rest()

    def stream(self, inbox: Inbox, like: dict[str, Any]) -> Stream:
        return _Stream(self, inbox)

    def _add(self, number: int, request: dict[str, Any], told: str) -> None:
        """One more request; `told` says how its answer is told (vLLM's `RequestOutputKind`)."""
        vllm: Any = importlib.import_module("vllm")
        fields = {**request, "detokenize": False, "output_kind": getattr(vllm.sampling_params.RequestOutputKind, told)}
        prompt = {"prompt_token_ids": fields.pop("prompt")}
        with torch.inference_mode(), _in_words("taking prompts"):
            self.llm.llm_engine.add_request(str(number), prompt, vllm.SamplingParams(**fields))

    def _step(self) -> list[Any]:
        with torch.inference_mode(), _in_words("writing"):
            return list(self.llm.llm_engine.step())

    def _rest(self) -> None:
        """Free the GPU's memory, if so set. Level 2 drops the weights: they come again with `update_weights`."""
        if self.settings.sleep and not self._asleep:
            with _in_words("going to sleep"):
                self.llm.sleep(level=2)
            self._asleep = True

    def _sync(self) -> None:
        version = weights_version(self.student.model)
        if self.settings.tensor_parallel == 1:
            weights = checkpoint_weights(self.student.model, untied=self._on_cpu)
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        else:
            with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
                save_weights(self.student.model, Path(folder) / "weights", untied=self._on_cpu)
                self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(Path(folder) / "weights")})
        if not self.llm.reset_prefix_cache():  # what it holds was computed with other weights
            raise VllmError("vLLM did not forget its prefix cache after new weights: it still has requests under way")
        self._synced = version

    def close(self) -> None:
        with trainers_own(keep_group=self._joins):
            self.llm.llm_engine.engine_core.shutdown()
        self._folder.cleanup()


class _Stream(Stream):
    """vLLM tells of every token, and one step of it is one of the caller's thread."""

    def __init__(self, engine: VllmEngine, inbox: Inbox) -> None:
        self._engine, self._inbox = engine, inbox
        self._under_way: set[str] = set()

    def start(self, number: int, request: dict[str, Any]) -> None:
        self._under_way.add(str(number))
        self._engine._add(number, request, "DELTA")

    def stop(self, number: int) -> None:
        if str(number) in self._under_way:
            self._under_way.remove(str(number))
            self._engine.llm.llm_engine.abort_request([str(number)])

    def advance(self) -> bool:
        for result in self._engine._step():
            if result.finished:
                self._under_way.discard(result.request_id)
            self._inbox.put((int(result.request_id), _read(result.outputs[0])))
        return True

    def close(self) -> None:
        if self._under_way:
            self._engine.llm.llm_engine.abort_request(sorted(self._under_way))
        else:
            self._engine._rest()


def _read(output: Any) -> Answer:
    token_ids = list(output.token_ids)
    logprobs = [place[token].logprob for place, token in zip(output.logprobs, token_ids, strict=True)]
    return Answer(token_ids, logprobs, output.finish_reason)


@contextmanager
def _in_words(doing: str) -> Iterator[None]:
    """Whatever vLLM fails with ends a run as every `EngineError` does: in words, on all ranks, with its steps kept."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        raise VllmError(f"vLLM failed while {doing}: {type(error).__name__}: {error}") from error
