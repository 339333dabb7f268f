"""Rollouts from a vLLM server (`/v1/completions` with token ids), and the student's weights on their way to it.

New weights go through a folder that both machines share: vLLM 0.32 has `/collective_rpc`, which makes its workers read a
folder again (`reload_weights`). It answers only if the server was started with VLLM_SERVER_DEV_MODE=1, and it lets anybody who
reaches it run methods of the workers: such a server belongs on loopback or in a closed network.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import nn

from iwopd.rollout.http import Connection, ServerError
from iwopd.rollout.requests import (
    IMPOSSIBLE,
    Vocabulary,
    check_prompts,
    check_settings,
    read_rollout,
    request_fields,
    request_seed,
)
from iwopd.rollout.sampler import Listener
from iwopd.rollout.sampling import SamplingSettings
from iwopd.rollout.weights import WeightSyncError, save_weights, weights_version
from iwopd.types import Prompt, Rollout


class RolloutServer:
    """One vLLM server; whoever samples calls `ready` first."""

    def __init__(
        self,
        connection: Connection,
        *,
        name: str | None = None,
        student: nn.Module | None = None,
        weights_folder: Path | None = None,
        max_in_flight: int = 64,
    ) -> None:
        """With a student and a folder the server gets its weights whenever they have changed; without, it keeps its own."""
        self.connection = connection
        self.max_in_flight = max_in_flight
        self.student, self.weights_folder = student, weights_folder
        self._synced: Any = None
        card = self._model_card(name)
        self.name: str = card["id"]
        self.max_model_len = int(card["max_model_len"])

    def _model_card(self, name: str | None) -> dict[str, Any]:
        cards = (self.connection.get("/v1/models") or {}).get("data") or []
        fitting = [card for card in cards if name in (None, card.get("id"))]
        if len(fitting) != 1 or "max_model_len" not in fitting[0]:
            raise ServerError(
                f"the rollout server {self.connection.url} has the models {[card.get('id') for card in cards]}; vllm.name is "
                f"{name!r}, which must name one of a vLLM server"
            )
        return dict(fitting[0])

    def complete(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The one choice of a completion, with ids."""
        answer = self.connection.post("/v1/completions", {"model": self.name, "return_token_ids": True, **fields})
        try:
            (choice,) = answer["choices"]
            whole = choice["token_ids"] is not None and choice["logprobs"]["token_logprobs"] is not None
        except (KeyError, TypeError, ValueError):
            whole = False
        if not whole:
            raise ServerError(
                f"the rollout server {self.connection.url} answers without token ids or log-probs: is it a vLLM of these days?"
            )
        return dict(choice)

    def ready(self) -> None:
        """Make sure that the server has the student's weights of this moment."""
        if self.student is None or self.weights_folder is None:
            return
        version = weights_version(self.student)
        if version == self._synced:
            return
        # Never the same name twice: a network file system might still show the server the old files.
        before = sorted(self.weights_folder.absolute().glob("weights-[0-9]*"))
        number = int(before[-1].name.removeprefix("weights-")) + 1 if before else 1
        folder = self.weights_folder.absolute() / f"weights-{number:06d}"
        try:
            save_weights(self.student, folder)
        except OSError as error:
            raise WeightSyncError(f"cannot write the student's weights to {folder} (vllm.weights_folder): {error}") from None
        try:
            self.connection.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
            self.connection.post("/reset_prefix_cache", {})  # what it holds was computed with other weights
        except ServerError as error:
            raise WeightSyncError(
                f"the server did not take new weights from {folder}: {error}. It must see this folder under this name and have "
                "been started with VLLM_SERVER_DEV_MODE=1 (docs/vllm.md)"
            ) from None
        for old in before:
            shutil.rmtree(old, ignore_errors=True)
        self._synced = version


class ServerSampler:
    """A `Sampler` that writes through a server. One request a rollout, because each has a seed of its own."""

    def __init__(self, server: RolloutServer, settings: SamplingSettings, *, vocab_size: int, rows: int | None = None) -> None:
        """`rows`: rows of the student's output matrix, if there are more than the `vocab_size` ids that exist."""
        check_settings(settings)
        self.server = server
        self.settings = settings
        self.vocabulary = Vocabulary(vocab_size, rows or vocab_size)
        self._checked = False

    def sample(
        self, prompts: Sequence[Prompt], *, seed: int, step: int, samples: int = 1, finished: Listener | None = None
    ) -> list[Rollout]:
        """`samples` rollouts of each prompt, in order, with the student's weights of this moment."""
        check_prompts(prompts, self.settings, self.vocabulary, self.server.max_model_len)
        if not prompts:
            return []
        self.server.ready()
        self._check_logprobs(prompts[0])
        places = [(prompt, sample) for prompt in prompts for sample in range(samples)]
        fields = request_fields(self.settings, self.vocabulary)

        def write(number: int) -> Rollout:
            prompt, sample = places[number]
            own = {"prompt": list(prompt.token_ids), "seed": request_seed(seed, step, prompt.id, sample)}
            choice = self.server.complete({**fields, **own})
            seen = choice.get("prompt_token_ids")
            if seen is not None and seen != own["prompt"]:
                raise ServerError(f"the rollout server read other ids than those of prompt {prompt.id!r}: {seen[:20]} ...")
            logprobs = choice["logprobs"]["token_logprobs"]
            rollout = read_rollout(
                prompt, sample, choice["token_ids"], logprobs, choice["finish_reason"], self.settings, self.vocabulary
            )
            if finished is not None:
                finished(number, rollout)
            return rollout

        pool = ThreadPoolExecutor(self.server.max_in_flight)
        try:
            return list(pool.map(write, range(len(places))))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _check_logprobs(self, prompt: Prompt) -> None:
        """Does the server say the log-probs that it samples with? At temperature 1 without padded ids all say them."""
        matters = self.settings.temperature not in (0, 1) or self.vocabulary.bias
        if self._checked or not matters:
            return
        fields = {**request_fields(self.settings, self.vocabulary), "prompt": list(prompt.token_ids), "logprobs": 1}
        fields |= {"temperature": 0.0, "max_tokens": 1}
        likeliest = self.server.complete(fields)
        ruled_out = {**(self.vocabulary.bias or {}), likeliest["token_ids"][0]: IMPOSSIBLE}
        without = self.server.complete({**fields, "logit_bias": ruled_out})
        best, next_best = (max(choice["logprobs"]["top_logprobs"][0].values()) for choice in (likeliest, without))
        if abs(best - next_best) < 1e-6:  # ruling the likeliest id out changes all log-probs that know of it
            raise ServerError(
                f"the rollout server gives log-probs before the temperature ({self.settings.temperature}) and the padded ids "
                "count: start it with --logprobs-mode processed_logprobs"
            )
        self._checked = True
