"""What a foreign engine is asked for and may answer, without one: requests, weights by name, connections."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from iwopd import algo
from iwopd.config import ConfigError, make_config
from iwopd.rollout.connection import Connection, ServerError
from iwopd.rollout.requests import Vocabulary, continued, read_rollout, request_fields, request_seed
from iwopd.rollout.sampling import SamplingError, SamplingSettings
from iwopd.rollout.streaming import Answer
from iwopd.rollout.weights import WeightSyncError, checkpoint_weights, save_weights, weights_version
from iwopd.types import Prompt
from models import make_model

PROMPT = Prompt("p", (2, 3))
SETTINGS = SamplingSettings(3, stop_ids=(1, 90))
WORDS = Vocabulary(21, 24)


def test_requests_leave_nothing_to_an_engines_defaults() -> None:
    fields = request_fields(SETTINGS, WORDS)
    assert fields["logit_bias"] == {21: -100.0, 22: -100.0, 23: -100.0}
    assert fields["stop_token_ids"] == [1]  # the model has no id 90
    assert (fields["top_p"], fields["top_k"], fields["min_p"], fields["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)
    assert request_fields(SETTINGS, Vocabulary(21, 21))["logit_bias"] is None
    with pytest.raises(SamplingError, match="at most 1024 padded ids"):
        Vocabulary(1000, 3000)


def test_seeds_differ_and_are_not_negative() -> None:
    places = [(seed, step, prompt, sample) for seed in (0, 1) for step in (1, 2) for prompt in "ab" for sample in (0, 1)]
    seeds = {request_seed(*place) for place in places}
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(0, 1, "a", 0) == request_seed(0, 1, "a", 0)


def test_the_rest_of_an_answer_has_noise_of_its_own() -> None:
    request = {"prompt": [2, 3], "max_tokens": 9, "seed": 5, "temperature": 1.0}
    assert continued(request, []) == request
    rest = continued(request, [7, 8])
    assert rest == {"prompt": [2, 3, 7, 8], "max_tokens": 7, "seed": rest["seed"], "temperature": 1.0}
    assert len({5, rest["seed"], continued(request, [7])["seed"]}) == 3


@pytest.mark.parametrize(
    ("ids", "logprobs", "reason", "words"),
    [
        ([], [], "length", "0 tokens"),
        ([4, 5, 1], [-1.0, -1.0], "stop", "3 tokens and 2 log-probs"),
        ([4, 21, 1], [-1.0] * 3, "stop", "has id 21, but the tokenizer has 21 ids"),
        ([4, 5, 1], [-1.0, None, -1.0], "stop", "not finite"),
        ([4, 5, 1], [-1.0, float("nan"), -1.0], "stop", "not finite"),
        ([4, 5], [-1.0] * 2, "stop", "ended after 2 of 3 tokens with id 5"),
        ([4, 5], [-1.0] * 2, "length", "smaller --max-model-len"),
        ([4, 5, 6], [-1.0] * 3, "abort", "reason 'abort'"),
    ],
)
def test_odd_answers_are_refused(ids: Any, logprobs: Any, reason: str, words: str) -> None:
    with pytest.raises(SamplingError, match=words):
        read_rollout(PROMPT, 0, Answer(ids, logprobs, reason), 3, SETTINGS.stop_ids, WORDS)


def test_good_answers_become_rollouts() -> None:
    ended = read_rollout(PROMPT, 2, Answer([4, 1], [-0.5, -0.25], "stop"), 3, SETTINGS.stop_ids, WORDS)
    assert (ended.stop_reason, ended.sample, ended.response_ids.tolist()) == ("eos", 2, [4, 1])
    assert ended.rollout_logprobs.tolist() == [-0.5, -0.25]
    cut_off = read_rollout(PROMPT, 0, Answer([4, 5, 6], [-1.0] * 3, "length"), 3, SETTINGS.stop_ids, WORDS)
    assert cut_off.stop_reason == "length"


# --- weights ---------------------------------------------------------------------------------------------------------


def test_every_optimizer_step_changes_the_version() -> None:
    """A tensor's own counter of in-place writes does not see the fused AdamW."""
    model = make_model("qwen3")
    before = weights_version(model)
    assert weights_version(model) == before
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert weights_version(model) != before


def test_names_are_those_of_a_checkpoint(tmp_path: Path) -> None:
    for kind in ("qwen3", "llama"):
        model = make_model(kind)
        model.save_pretrained(tmp_path / kind)
        saved = load_file(tmp_path / kind / "model.safetensors")
        ours = dict(checkpoint_weights(model))
        assert ours.keys() == saved.keys()
        assert all(torch.equal(ours[name], saved[name]) for name in saved)
    untied = dict(checkpoint_weights(make_model("qwen3"), untied=True))
    assert torch.equal(untied["lm_head.weight"], untied["model.embed_tokens.weight"])


def test_experts_are_unpacked(tmp_path: Path) -> None:
    """Transformers holds the experts of a layer in one tensor; a checkpoint, which vLLM knows, has a matrix for each."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 21}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    ours = dict(checkpoint_weights(model))
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in ours
    assert ours.keys() == saved.keys()
    assert all(torch.equal(ours[name], saved[name]) for name in saved)


def test_adapters_are_added_in() -> None:
    peft = pytest.importorskip("peft")
    plain, model = make_model("qwen3", seed=3), make_model("qwen3", seed=3)
    model.add_adapter(peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    ours = dict(checkpoint_weights(model))
    assert ours.keys() == dict(checkpoint_weights(plain)).keys()
    plain.load_state_dict(ours, strict=False)
    ids = torch.tensor([[2, 3, 4, 5]])
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model.eval()(ids).logits, rtol=1e-4, atol=1e-4)


def test_quantised_weights_are_refused() -> None:
    model = make_model("qwen3")
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(WeightSyncError, match=r"rollout.engine = 'local'"):
        list(checkpoint_weights(model))


def test_weights_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iwopd.rollout.weights.SHARD_BYTES", 10_000)
    model = make_model("llama")
    save_weights(model, tmp_path / "weights")
    files = sorted((tmp_path / "weights").glob("*.safetensors"))
    assert len(files) > 2
    together = {name: values for file in files for name, values in load_file(file).items()}
    assert all(torch.equal(together[name], values) for name, values in checkpoint_weights(model))
    assert json.loads((tmp_path / "weights" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


# --- settings and numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout": {"engine": "vllm", "top_k": 5}}, "rollout.top_k 5"),
        ({"rollout": {"engine": "server"}}, "needs engine.server.url"),
        ({"rollout": {"engine": "server"}, "engine": {"server": {"url": "http://a:1"}}}, "engine.server.weights_folder"),
        ({"engine": {"server": {"url": "gpu1:8000"}}}, "http://host:8000"),
        ({"engine": {"server": {"url": "http://me:secret@gpu1:8000"}}}, "name it: api_key_env$"),
        ({"engine": {"server": {"api_key_env": "sk-123"}}}, "not the key itself$"),
        ({"rollout": {"engine": "vlm"}}, "unknown rollout engine 'vlm'; did you mean 'vllm'. choices: local, vllm, server"),
        ({"engine": {"vlm": {"dtype": "float32"}}}, "engine: unknown rollout engine 'vlm'"),
        ({"engine": {"vllm": {"memory_shar": 0.5}}}, "did you mean 'engine.vllm.memory_share'"),
        ({"engine": {"local": {"dtype": "float32"}}}, "engine.local.dtype: there is no such setting"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_config({"models": {"world": "clean"}, **changes})


def test_mismatch() -> None:
    old = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, float("nan"), float("nan")]])
    engine = torch.tensor([[-1.0, -2.5, -5.0], [-1.0, float("nan"), float("nan")]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    mismatch = algo.rollout_mismatch(old, engine, mask)
    ratios = torch.tensor([0.0, 0.5, 2.0, 0.0]).double().exp()
    assert mismatch.mean_ratio == pytest.approx(float(ratios.mean()))
    assert mismatch.largest_deviation == pytest.approx(float(ratios.max() - 1))
    assert mismatch.truncated == 0.25
    assert mismatch.mean_difference == pytest.approx(2.5 / 4)
    assert algo.rollout_mismatch(old, engine, mask & False) == (1.0, 0.0, 0.0, 0.0)


# --- HTTP ------------------------------------------------------------------------------------------------------------


@contextmanager
def answering(*answers: tuple[int, str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A real server that gives these answers in turn; yields its URL and what it was asked."""
    asked: list[dict[str, Any]] = []
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append({"path": self.path, "body": json.loads(body), "key": self.headers.get("Authorization")})
            status, text = left.pop(0)
            if status:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())
            else:
                self.connection.close()  # in the middle of the conversation

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_server_that_is_away_for_a_moment_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_KEY", "sk-1")
    with answering((503, "busy"), (0, ""), (200, '{"good": 1}')) as (url, asked):
        assert Connection(url, "ROLLOUT_KEY", patience=30).post("/v1/x", {"a": 1}) == {"good": 1}
    assert [question["body"] for question in asked] == [{"a": 1}] * 3
    assert asked[0]["key"] == "Bearer sk-1"


def test_a_refusal_is_final_and_shows_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_KEY", "sk-1")
    with answering((401, "no entry for sk-1")) as (url, asked), pytest.raises(ServerError, match=r"401 no entry for \[key\]"):
        Connection(url, "ROLLOUT_KEY").post("/v1/x", {})
    assert len(asked) == 1
    monkeypatch.delenv("ROLLOUT_KEY")
    with pytest.raises(ServerError, match="ROLLOUT_KEY, which should hold"):
        Connection(url, "ROLLOUT_KEY").post("/v1/x", {})


def test_patience_ends() -> None:
    with answering() as (url, _):
        pass
    with pytest.raises(ServerError, match=r"was away for 1 s \(engine.server.patience\)"):
        Connection(url, patience=1).post("/v1/x", {})
    with answering((200, "<html>")) as (url, _), pytest.raises(ServerError, match="no JSON"):
        Connection(url).post("/v1/x", {})


def test_waiting_for_a_server_leaves_the_checkpointed_random_state_alone() -> None:
    """Python's global generator is saved with checkpoints: how often a server was away must not change a run."""
    state = random.getstate()
    with answering((503, "busy"), (200, "{}")) as (url, _):
        Connection(url, patience=30).post("/v1/x", {})
    assert random.getstate() == state
