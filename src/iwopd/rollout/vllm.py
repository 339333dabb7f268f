"""vLLM in this process: an engine that holds a copy of the student's weights, and samplers that share it.

The engine is built from the student's config alone and gets all its weights from the student, before the first rollout and
after every update. So there is one way in which weights come, whatever the student was loaded from, and no folder that could
hold others. vLLM is an extra (`iwopd[vllm]`) and imported when an engine is built.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from iwopd.errors import UserError
from iwopd.rollout.requests import (
    Vocabulary,
    check_prompts,
    check_settings,
    read_rollout,
    request_fields,
    request_seed,
)
from iwopd.rollout.sampler import Listener
from iwopd.rollout.sampling import SamplingSettings
from iwopd.rollout.weights import checkpoint_weights, plain_config, save_weights, weights_version
from iwopd.types import Prompt, Rollout


class VllmError(UserError, RuntimeError):
    """vLLM that is not there or does not start, with the reason."""


@dataclass(frozen=True)
class EngineOptions:
    """How vLLM runs. `sleep`: give its GPU memory back between rollouts."""

    max_model_len: int
    dtype: str = "float32"
    memory_share: float = 0.4
    cache_gb: float | None = None
    tensor_parallel: int = 1
    eager: bool = False
    sleep: bool = False
    seed: int = 0


class VllmEngine:
    """One vLLM with the weights of `student`; whoever samples calls `ready` first."""

    def __init__(self, student: nn.Module, options: EngineOptions) -> None:
        """Start vLLM; with several GPUs (tensor parallel) it has processes of its own, and weights travel through files."""
        self.student = student
        self.options = options
        self._synced: Any = None
        self._asleep = False
        self._folder = tempfile.TemporaryDirectory(prefix="iwopd-vllm-", ignore_cleanup_errors=True)
        self._on_cpu = not torch.cuda.is_available()
        # vLLM 0.32 on a CPU packs an output matrix that is the embedding when it starts, and leaves it as it was when weights
        # are reloaded: there the engine gets one of its own.
        plain_config(student, untied=self._on_cpu).save_pretrained(self._folder.name)
        try:
            self.llm = self._start()
        except BaseException:
            self._folder.cleanup()
            raise

    def _start(self) -> Any:
        if self.options.sleep and self._on_cpu:
            raise VllmError("vllm.sleep frees GPU memory, and there is no GPU here: leave it out")
        # In this process, so that weights need no copy on their way; and quiet, because the console is the run's.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        cache_gb = self.options.cache_gb or (1.0 if self._on_cpu else None)
        arguments: dict[str, Any] = {
            "model": self._folder.name,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "dtype": self.options.dtype,
            "max_model_len": self.options.max_model_len,
            "gpu_memory_utilization": self.options.memory_share,
            "kv_cache_memory_bytes": None if cache_gb is None else int(cache_gb * 2**30),
            "tensor_parallel_size": self.options.tensor_parallel,
            "enforce_eager": self.options.eager,
            "enable_prefix_caching": True,
            "enable_sleep_mode": self.options.sleep,
            "seed": self.options.seed,
            "disable_log_stats": True,
        }
        try:
            with _own_threads():
                return importlib.import_module("vllm").LLM(**arguments)
        except (ImportError, AttributeError) as error:
            raise VllmError(
                f"rollout.engine = 'vllm' needs vLLM, which cannot be imported ({error}): pip install 'iwopd[vllm]', in an "
                "environment of its own (docs/vllm.md), or set rollout.engine = 'local'"
            ) from None
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise VllmError(f"vLLM does not start with this student: {error}") from error

    def ready(self) -> None:
        """Awake and with the student's weights of this moment."""
        if self._asleep:
            self.llm.wake_up(tags=["weights"])
        if self._asleep or self._synced != weights_version(self.student):
            self._sync()
        if self._asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self._asleep = False

    def run(self, requests: Sequence[tuple[Any, Any]]) -> Generator[tuple[int, Any], None, None]:
        """Number and output of each request (prompt, parameters) as it is finished."""
        core = self.llm.llm_engine
        waiting = {str(number) for number in range(len(requests))}
        try:
            with torch.inference_mode():
                for number, (prompt, parameters) in enumerate(requests):
                    core.add_request(str(number), prompt, parameters)
            while core.has_unfinished_requests():
                with torch.inference_mode():
                    results = core.step()
                for result in results:
                    waiting.discard(result.request_id)
                    yield int(result.request_id), result.outputs[0]
        finally:
            if waiting:  # whoever asked has failed: the next ones must not get these answers
                core.abort_request(sorted(waiting))

    def rest(self) -> None:
        """Give the GPU back, if so set. The weights need not be kept: they come anew with `ready`."""
        if self.options.sleep and not self._asleep:
            self.llm.sleep(level=2)
            self._asleep = True

    def _sync(self) -> None:
        version = weights_version(self.student)
        if self.options.tensor_parallel == 1:
            weights = checkpoint_weights(self.student, untied=self._on_cpu)
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        else:
            with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
                save_weights(self.student, Path(folder) / "weights")
                self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(Path(folder) / "weights")})
        if not self.llm.reset_prefix_cache():  # what it holds was computed with other weights
            raise VllmError("vLLM did not forget its prefix cache after new weights: it still has requests under way")
        self._synced = version

    def close(self) -> None:
        """End vLLM; it must not be asked again."""
        self.llm.llm_engine.engine_core.shutdown()
        self._folder.cleanup()


class VllmSampler:
    """A `Sampler` that writes through an engine. Several (training, evaluation) share one."""

    def __init__(self, engine: VllmEngine, settings: SamplingSettings, *, vocab_size: int) -> None:
        """`vocab_size`: ids from here on do not exist (padding rows of the output matrix)."""
        check_settings(settings)
        self.engine = engine
        self.settings = settings
        self.vocabulary = Vocabulary(vocab_size, output_rows(engine.student))

    def sample(
        self, prompts: Sequence[Prompt], *, seed: int, step: int, samples: int = 1, finished: Listener | None = None
    ) -> list[Rollout]:
        """`samples` rollouts of each prompt, in order, with the student's weights of this moment."""
        check_prompts(prompts, self.settings, self.vocabulary, self.engine.options.max_model_len)
        if not prompts:
            return []
        vllm: Any = importlib.import_module("vllm")
        places = [(prompt, sample) for prompt in prompts for sample in range(samples)]
        fields = request_fields(self.settings, self.vocabulary)
        fields |= {"detokenize": False, "output_kind": vllm.sampling_params.RequestOutputKind.FINAL_ONLY}
        requests = [
            (
                {"prompt_token_ids": list(prompt.token_ids)},
                vllm.SamplingParams(**fields, seed=request_seed(seed, step, prompt.id, sample)),
            )
            for prompt, sample in places
        ]
        self.engine.ready()
        rollouts: dict[int, Rollout] = {}
        with closing(self.engine.run(requests)) as outputs:
            for number, output in outputs:
                prompt, sample = places[number]
                token_ids = list(output.token_ids)
                logprobs = [place[token].logprob for place, token in zip(output.logprobs, token_ids, strict=True)]
                rollouts[number] = read_rollout(
                    prompt, sample, token_ids, logprobs, output.finish_reason, self.settings, self.vocabulary
                )
                if finished is not None:
                    finished(number, rollouts[number])
        self.engine.rest()
        return [rollouts[number] for number in range(len(places))]


def output_rows(model: Any) -> int:
    """Rows of the output matrix."""
    return int(model.get_output_embeddings().weight.shape[0])


@contextmanager
def _own_threads() -> Iterator[None]:
    """On a CPU vLLM replaces `torch.set_num_threads` and lowers their number; the trainer keeps its own."""
    setter, count = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = setter
        torch.set_num_threads(count)
