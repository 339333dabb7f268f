"""Serve a model as a teacher: other processes and machines have their rollouts scored by it. It speaks the same language as
vLLM's completions (prompt_logprobs), which is the better choice where vLLM runs; this one needs nothing but transformers, and
says more (teacher.dialect = 'iwopd'): entropies, likeliest ids, log-probs of chosen ids, whole distributions.

It listens on this machine only, unless the environment variable that --token-env names holds a secret; clients name the
variable that holds it on their side with --teacher.api_key_env.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from typing import Any

from iwopd.commands.options import add_model_options, model_options

HELP = "let other processes have their rollouts scored by a model"
EPILOG = """\
examples:
  iwopd serve-teacher Qwen/Qwen3-4B-Instruct-2507 --device cuda --dtype bfloat16
  iwopd train recipe.toml --teacher.urls "['http://127.0.0.1:8011']" --teacher.dialect iwopd
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="local folder, hub id or GGUF file")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8011, help="0: any free one (default: 8011)")
    parser.add_argument("--name", help="what clients call the model (default: as given)")
    token = "variable that holds the token (default: IWOPD_SERVER_TOKEN)"
    parser.add_argument("--token-env", default="IWOPD_SERVER_TOKEN", help=token)
    add_model_options(parser)
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--token-budget", type=int, help="tokens that go through the model at a time")
    parser.add_argument("--vocab-size", type=int, help="ids that can occur, without padding rows (default: its tokenizer's)")
    states = "how a float32 model's hidden states travel: in 16 bits, or as they are (default: 16-bit)"
    parser.add_argument("--states", choices=("16-bit", "float32"), default="16-bit", help=states)
    cache = (
        "key/value cache for answers that clients follow while they are written, in GB (default: half of what is free; CPU: 2)"
    )
    parser.add_argument("--cache-gb", type=float, help=cache)
    parser.add_argument("--max-length", type=int, help="longest sequence, one token more included (default: the model's)")


def run(options: argparse.Namespace, rest: list[str]) -> int:
    import torch

    from iwopd.model_facts import context_length
    from iwopd.models import load_model
    from iwopd.rope import fix_rope
    from iwopd.section import check_variable
    from iwopd.teacher.serving import ServingError, TeacherServer
    from iwopd.teacher.serving_model import ServingModel, served_vocabulary

    if not 0 <= options.port < 2**16:
        raise ServingError(f"--port must lie between 0 and 65535, got {options.port}")
    for name in ("threads", "token_budget", "max_length"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ServingError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    try:
        check_variable(options.token_env)
    except ValueError as error:
        raise ServingError(f"--token-env {error}") from None
    if options.cache_gb is not None and not 0 <= options.cache_gb < 2**20:
        raise ServingError(f"--cache-gb must not be negative, got {options.cache_gb}")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    token = os.environ.get(options.token_env, "").strip() or None
    # The port comes first: an address that is taken should not cost the loading of a model.
    with TeacherServer(options.name or options.model, host=options.host, port=options.port, token=token) as server:
        print(f"loading {options.model}", file=sys.stderr, flush=True)  # stdout begins with the address
        model = load_model(options.model, **model_options(options)).eval()
        length = options.max_length or context_length(model.config) or 2**31
        if (note := fix_rope(model, length)) is not None:
            print(note, flush=True)
        trust = options.trust_remote_code
        ids = served_vocabulary(options.model, model, given=options.vocab_size, trust_remote_code=trust)
        half = options.states == "16-bit"
        cache = None if options.cache_gb is None else int(options.cache_gb * 2**30)
        server.model = ServingModel(
            model,
            vocab_size=ids,
            max_length=length,
            token_budget=options.token_budget,
            half_states=half,
            cache_bytes=cache,
        )
        _stop_on_signals(server)
        print(f"serving {server.name} at {server.url} ({ids} ids, {length} tokens); stop with Ctrl-C", flush=True)
        server.serve_forever()
    return 0


def _stop_on_signals(server: Any) -> None:
    def stop(*_: Any) -> None:
        threading.Thread(target=server.shutdown, daemon=True).start()  # it waits for the loop, which this thread runs

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
