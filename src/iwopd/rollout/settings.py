"""Settings of the built-in engines that have any: `[engine.vllm]` and `[engine.server]`."""

from __future__ import annotations

from pydantic import Field

from iwopd.section import Dtype, Place, Section, Url, Variable


class VllmSettings(Section):
    """The engine `vllm`: vLLM in the training process. verl's rollouts read this section, too."""

    dtype: Dtype | None = Field(
        None, description="precision of vLLM's copy of the student; empty: bfloat16 if precision = 'bf16', else models.dtype"
    )
    max_model_len: int | None = Field(None, ge=2, description="longest prompt and answer; empty: what the settings allow")
    memory_share: Place[float] = Field(0.4, gt=0, le=1, description="share of each GPU's memory that vLLM may take")
    cache_gb: float | None = Field(None, gt=0, description="key/value cache in GB; empty: the rest of memory_share (CPU: 1)")
    tensor_parallel: int = Field(
        1,
        ge=1,
        description="GPUs of one copy of the student; 1 with several training processes (above 1: never run on GPUs)",
    )
    eager: bool = Field(False, description="no CUDA graphs, no compilation: starts faster, runs slower")
    sleep: Place[bool] = Field(False, description="free the GPU's memory between rollouts (was never run)")


class ServerSettings(Section):
    """The engine `server`: a vLLM server on this or another machine."""

    url: Place[Url | None] = Field(None, description="the server, e.g. http://gpu1:8000")
    name: str | None = Field(None, description="what the server calls the student; empty: its only model")
    dtype: Dtype | None = Field(
        None,
        description="precision that the server was started with (--dtype); empty: as that of engine.vllm",
    )
    weights_folder: Place[str | None] = Field(
        None, description="folder, for this run alone, that the server sees under the same name: new weights go through it"
    )
    api_key_env: Place[Variable | None] = Field(None, description="environment variable of the server's API key; empty: none")
    max_in_flight: Place[int] = Field(64, ge=1, description="requests under way at once, of all training processes")
    request_timeout: Place[float] = Field(1800.0, gt=0, description="seconds for one attempt at one request")
    patience: Place[float] = Field(120.0, gt=0, description="seconds that the server may be away before the run ends")
