"""Rollouts from a vLLM server (`/v1/completions` with token ids), and the student's weights on their way to it.

New weights go through a folder that both machines share: vLLM 0.32 reads it again on `/collective_rpc` (`reload_weights`). That
needs VLLM_SERVER_DEV_MODE=1 and lets anybody who reaches the server run methods of its workers: keep it on loopback or in a
closed network.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from iwopd.http_clients import hide_key
from iwopd.rollout.connection import Connection, ServerError
from iwopd.rollout.engine import Student
from iwopd.rollout.requests import IMPOSSIBLE, RequestEngine
from iwopd.rollout.restarts import Restarts
from iwopd.rollout.server_stream import ServerStream
from iwopd.rollout.settings import ServerSettings
from iwopd.rollout.streaming import Answer, Inbox, Stream
from iwopd.rollout.weights import WeightSyncError, save_weights, weights_version


class ServerEngine(RequestEngine):
    """One vLLM server. With a folder for weights it follows the student; without one it keeps its own weights."""

    settings_type = ServerSettings
    several_ranks = True
    weights = "elsewhere"

    def __init__(self, student: Student, settings: ServerSettings) -> None:
        super().__init__(student, settings)
        self.restarts = Restarts(self._bring_weights)
        self.connection = Connection(
            str(settings.url), settings.api_key_env, settings.request_timeout, settings.patience, self.restarts.was_away
        )
        self._checked: set[tuple[float, bool]] = set()
        card = self._model_card()
        self.name: str = card["id"]
        self.context = int(card["max_model_len"])

    @classmethod
    def check(cls, settings: ServerSettings, *, trained: bool) -> None:
        if settings.url is None:
            raise ValueError("the engine 'server' needs engine.server.url, e.g. http://gpu1:8000 (docs/vllm.md)")
        if trained and settings.weights_folder is None:
            raise ValueError(
                "to train with the engine 'server' set engine.server.weights_folder: a folder that this machine and the server "
                "share, through which it gets the weights of every step (docs/vllm.md); or use rollout.engine = 'vllm'"
            )

    @property
    def folder(self) -> Path | None:
        return None if self.settings.weights_folder is None else Path(self.settings.weights_folder).absolute()

    def update_weights(self) -> None:
        """Write the student's weights to a new folder and have the server read them, if they have changed. Rank 0's work."""
        if self.folder is None or self.student.rank > 0:
            return
        version = weights_version(self.student.model)
        if version == self._synced:
            return
        # Never the same name twice: a network file system might still show the server the old files.
        before = sorted(self.folder.glob("weights-[0-9]*"))
        number = int(before[-1].name.removeprefix("weights-")) + 1 if before else 1
        folder = self.folder / f"weights-{number:06d}"
        try:
            save_weights(self.student.model, folder)
        except OSError as error:
            raise WeightSyncError(
                f"cannot write the student's weights to {folder} (engine.server.weights_folder): {error}"
            ) from None
        self._read_weights(folder)
        for old in before:
            shutil.rmtree(old, ignore_errors=True)
        self._synced = version

    def _bring_weights(self) -> None:
        """The newest weights once more. Any rank's work: the folder is shared."""
        if self.folder is not None and (written := sorted(self.folder.glob("weights-[0-9]*"))):
            self._read_weights(written[-1])

    def _read_weights(self, folder: Path) -> None:
        try:
            self.connection.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
            self.connection.post("/reset_prefix_cache", {})  # what it holds was computed with other weights
        except ServerError as error:
            raise WeightSyncError(
                f"the server did not take new weights from {folder}: {error}. It must see this folder under this name and have "
                "been started with VLLM_SERVER_DEV_MODE=1 (docs/vllm.md)"
            ) from None

    def answers(self, requests: Sequence[dict[str, Any]]) -> Generator[tuple[int, Answer], None, None]:
        self._check_logprobs(requests[0])
        pool = ThreadPoolExecutor(self.in_flight)
        try:
            numbers = {pool.submit(self._answer, request): number for number, request in enumerate(requests)}
            for done in as_completed(numbers):
                yield numbers[done], done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def stream(self, inbox: Inbox, like: dict[str, Any]) -> Stream:
        self._check_logprobs(like)
        return ServerStream(self.connection, self.fields, self.in_flight, inbox, self.restarts)

    @property
    def fields(self) -> dict[str, Any]:
        """Of every request."""
        return {"model": self.name, "return_token_ids": True}

    @property
    def in_flight(self) -> int:
        """Requests of this process that are under way at once."""
        return max(1, int(self.settings.max_in_flight) // self.student.ranks)

    def _answer(self, request: dict[str, Any]) -> Answer:
        choice = self._complete(request)
        seen = choice.get("prompt_token_ids")
        if seen is not None and seen != request["prompt"]:
            raise ServerError(f"the rollout server read other ids than those of the prompt: {str(seen)[:80]} ...")
        return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice.get("finish_reason"))

    def _complete(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The one choice of a completion, with ids."""
        tokens = len(fields["prompt"]) + fields["max_tokens"]
        answer = self.connection.post("/v1/completions", {**self.fields, **fields}, tokens, first=self.restarts.make_sure)
        try:
            (choice,) = answer["choices"]
            whole = all(isinstance(part, list) for part in (choice["token_ids"], choice["logprobs"]["token_logprobs"]))
        except (KeyError, TypeError, ValueError):
            whole = False
        if not whole:
            raise ServerError(
                f"the rollout server {self.connection.url} answers without token ids or log-probs; vLLM 0.32 gives both"
            )
        return dict(choice)

    def _model_card(self) -> dict[str, Any]:
        name = self.settings.name
        answer = self.connection.get("/v1/models")
        cards = answer.get("data") if isinstance(answer, dict) else None
        cards = [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
        fitting = [card for card in cards if name in (None, card.get("id"))]
        if len(fitting) != 1 or type(fitting[0].get("max_model_len")) is not int or not isinstance(fitting[0].get("id"), str):
            names = hide_key(str([card.get("id") for card in cards]), self.settings.api_key_env)
            raise ServerError(
                f"the rollout server {self.connection.url} has the models {names}; "
                f"engine.server.name is {name!r}, which must name one of a vLLM server"
            )
        return dict(fitting[0])

    def _check_logprobs(self, request: dict[str, Any]) -> None:
        """Does the server give the log-probs that it samples with? At temperature 1 without padded ids all servers do."""
        temperature, bias = request["temperature"], request["logit_bias"]
        kind = (temperature, bias is not None)
        if kind in self._checked or (temperature in (0, 1) and bias is None):
            return
        fields = {**request, "logprobs": 1, "temperature": 0.0, "max_tokens": 1}
        likeliest = self._complete(fields)
        without = self._complete({**fields, "logit_bias": {**(bias or {}), likeliest["token_ids"][0]: IMPOSSIBLE}})
        try:
            best, next_best = (float(max(one["logprobs"]["top_logprobs"][0].values())) for one in (likeliest, without))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
            raise ServerError(f"the rollout server {self.connection.url} gives no log-probs of likely ids") from None
        if abs(best - next_best) < 1e-6:  # ruling the likeliest id out changes all log-probs that know of it
            raise ServerError(
                f"the rollout server gives log-probs before the temperature ({temperature}) and the padded ids count: start it "
                "with --logprobs-mode processed_logprobs"
            )
        self._checked.add(kind)
