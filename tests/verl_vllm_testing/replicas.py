"""Asks verl's vLLM replicas for answers and for scores of given ids: `python -m verl_vllm_testing.replicas FOLDER`.

`FOLDER/questions.json` has `models` (paths), `prompts` (ids, for each model), `max_tokens` and `k`. `FOLDER/answers.json` gets
a list for each model with, for each prompt, the answer's `ids` and `logprobs`, and of prompt and answer together what verl's
teacher is asked for: `scores` (of the ids) and `likeliest` (the k likeliest ids with their log-probs at every place).
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import ray
import verl  # noqa: F401  # registers the platform
from omegaconf import OmegaConf
from verl.workers.config import RolloutConfig
from verl.workers.rollout.replica import get_rollout_replica_class

from verl_vllm_testing import SMALL, environment


def replica(path: str, rank: int) -> Any:
    """A replica as verl makes it for a teacher: its own weights, its own place."""
    config = RolloutConfig(
        name="vllm", dtype="float32", load_format="auto", tensor_model_parallel_size=1, max_model_len=256, enforce_eager=True,
        **SMALL,
    )  # fmt: skip
    model = OmegaConf.create({"_target_": "verl.workers.config.HFModelConfig", "path": path})
    return get_rollout_replica_class("vllm")(rank, config, model, gpus_per_node=1, is_teacher_model=True)


async def asked(server: Any, prompt: list[int], name: str, max_tokens: int, k: int) -> dict[str, Any]:
    """One answer, and the scores of prompt and answer."""
    written = await server.generate.remote(prompt, {"max_tokens": max_tokens, "temperature": 1.0, "logprobs": True}, name)
    whole = [*prompt, *written.token_ids]
    answer: dict[str, Any] = {"ids": list(written.token_ids), "logprobs": written.log_probs}
    for what, count in (("scores", 0), ("likeliest", k)):  # as verl's teacher manager asks
        params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": count, "detokenize": False}
        fields = (await server.generate.remote(whole, params, f"{name}-{what}")).extra_fields
        answer[what] = {"ids": fields["prompt_ids"], "logprobs": fields["prompt_logprobs"]}
    return answer


async def main(folder: Path) -> None:
    questions = json.loads((folder / "questions.json").read_text())
    replicas = [replica(path, rank) for rank, path in enumerate(questions["models"])]
    await asyncio.gather(*(one.init_standalone() for one in replicas))
    limits = questions["max_tokens"], questions["k"]
    answers = [
        await asyncio.gather(*(asked(one.server_handle, ids, f"{number}", *limits) for number, ids in enumerate(prompts)))
        for one, prompts in zip(replicas, questions["prompts"], strict=True)
    ]
    (folder / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    ray.init(num_gpus=2, num_cpus=16, include_dashboard=False, runtime_env={"env_vars": environment()})
    asyncio.run(main(Path(sys.argv[1])))
    ray.shutdown()
