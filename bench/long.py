"""One training step at the paper's lengths on a CPU: time by stage, and memory.

    python bench/long.py                      # answers of 4,096 and of 16,384 tokens: a table (about 20 minutes with two cores)
    python bench/long.py --tokens 2048 --json # one length; the last line is one JSON object

Student and teacher are narrow (2 layers, width 64) and have a whole vocabulary (151,936 ids). Prompts of 512 tokens, four
rollouts that never end by themselves. The stages are the trainer's own functions: models loaded and heads checked, the doctor,
rollouts, scores of teacher and student, two updates, a checkpoint. Each length runs in a process of its own. Memory: the
process's peak minus its size with both models loaded.

Exit code 1 if a bar is missed: at most 2 GB above the models, and from one length to the next no more growth than 1.25 times
that of the key/value cache and the activations (as `iwopd.train.memory` counts them) plus 100 MB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VOCAB, WIDTH, LAYERS = 151_936, 64, 2
PROMPT_TOKENS = 512
LENGTHS = (4096, 16_384)
MOST_MB = 2000.0
GROWTH, SLACK_MB = 1.25, 100.0


def memory_mb(name: str) -> float:
    """`VmRSS` (resident) or `VmHWM` (its peak) of this process."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def make_pair(folder: Path, longest: int, vocab: int, rollouts: int) -> None:
    """Student, teacher and prompts. The tokenizer has one word per id; the one that ends an answer is hardly ever written."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]

    words = {"<pad>": 0, "<end>": 1, **{f"w{number}": number for number in range(2, vocab)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<end>", chat_template=template)  # type: ignore[no-untyped-call]
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=WIDTH // 4,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    for name, seed in (("student", 1), ("teacher", 2)):
        torch.manual_seed(seed)
        model: Any = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
        with torch.no_grad():  # all embeddings share a large component, and the end's points the other way
            model.get_input_embeddings().weight[:, 0] = 0.5
            model.get_input_embeddings().weight[1, 0] = -20.0
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, vocab, (rollouts, PROMPT_TOKENS), generator=generator).tolist()
    lines = [json.dumps({"id": str(row), "prompt": " ".join(f"w{word}" for word in words)}) for row, words in enumerate(ids)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def settings(folder: Path, tokens: int, rollouts: int) -> dict[str, Any]:
    return {
        "steps": 1,
        "models": {"student": str(folder / "student"), "teacher": str(folder / "teacher")},
        "data": {"prompts": str(folder / "prompts.jsonl")},
        "rollout": {"prompts_per_step": rollouts, "max_tokens": tokens},
        "optim": {"lr": 1e-4, "mini_batches": 2},
        "method": {"weights": "cumulative-share"},
        "tracking": {"console": "off"},
    }


def measure(tokens: int, vocab: int, rollouts: int, *, progress: bool) -> dict[str, Any]:
    """A whole step in this process."""
    from iwopd.config import make_config
    from iwopd.models import load_model, load_tokenizer
    from iwopd.runs.directory import RunDirectory
    from iwopd.train.assembly import assemble
    from iwopd.train.checkpoint import CheckpointStore
    from iwopd.train.doctor import examine_models, examine_recipe, refuse
    from iwopd.train.loop import save, take_step
    from iwopd.train.memory import UPDATE, ModelShape, RunShape
    from iwopd.train.state import TrainingState

    seconds: dict[str, float] = {}

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        if progress:
            print(f"{tokens:,} tokens: {name} ...", file=sys.stderr, flush=True)
        start = time.perf_counter()
        yield
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        # In a process of its own: what making the models takes is not what training takes.
        make = f"import long; long.make_pair(long.Path({scratch!r}), {PROMPT_TOKENS + tokens + 1}, {vocab}, {rollouts})"
        subprocess.run([sys.executable, "-c", make], check=True, cwd=Path(__file__).parent)
        config = make_config(settings(folder, tokens, rollouts))
        run = RunDirectory(folder / "run")
        loaded = [load_model(folder / name) for name in ("student", "teacher")], load_tokenizer(folder / "student")
        with_models = memory_mb("VmRSS")
        del loaded
        with stage("doctor"):
            refuse(examine_recipe(config, run.path))
        with stage("load and check heads"):
            parts = assemble(config, lambda _: None)
        with parts:
            run.create(config, parts.order.fingerprint())
            with stage("doctor"):
                refuse(examine_models(config, parts, run.path))
            with stage("step"):
                stats = take_step(config, parts, run, 1)
            del seconds["step"]
            seconds |= stats.seconds
            with stage("checkpoint"):
                save(config, parts, run, CheckpointStore(run.checkpoints), TrainingState(step=1))
        shape = ModelShape.of(parts.student.config)
        whole = RunShape(
            config=config, student=shape, teachers={"teacher": shape}, reference=None, longest=PROMPT_TOKENS + tokens
        ).on_one_device(gpus=0)
        activations = max(whole.stages[one]["activations"] for one in UPDATE)
    return {
        "tokens": tokens,
        "vocab": vocab,
        "rollouts": stats.rollouts,
        "written": int(stats.tokens),
        "updates": int(stats.metrics["update/count"]),
        "loss": stats.loss,
        "peak_mb_above_models": round(memory_mb("VmHWM") - with_models, 1),
        "cache_and_activations_mb": round((whole.writer.cache + activations) / 2**20, 1),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
    }


def child(tokens: int, vocab: int, rollouts: int, *, progress: bool) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--here", "--tokens", str(tokens), "--vocab", str(vocab), "--rollouts", str(rollouts)]
    done = subprocess.run([*command, *([] if progress else ["--quiet"])], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"the step with answers of {tokens:,} tokens failed (exit code {done.returncode}); its words are above")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def missed(results: list[dict[str, Any]]) -> list[str]:
    """Bars that were not met, in words."""
    words = [
        f"{one['tokens']:,} tokens: {one['peak_mb_above_models']:,.0f} MB above the models, the bar is {MOST_MB:,.0f}"
        for one in results
        if one["peak_mb_above_models"] > MOST_MB
    ]
    for short, long in itertools.pairwise(results):
        grown = long["peak_mb_above_models"] - short["peak_mb_above_models"]
        allowed = GROWTH * (long["cache_and_activations_mb"] - short["cache_and_activations_mb"]) + SLACK_MB
        if grown > allowed:
            words.append(f"{short['tokens']:,} to {long['tokens']:,} tokens: {grown:,.0f} MB more, the bar is {allowed:,.0f}")
    return words


def table(results: list[dict[str, Any]]) -> str:
    stages = list(results[0]["seconds"])
    lines = [
        f"| answer tokens | {' | '.join(f'{name}, s' for name in stages)} | cache and activations, MB | peak above models, MB |"
    ]
    lines.append(f"|{' --- |' * (len(stages) + 3)}")
    for one in results:
        times = " | ".join(f"{one['seconds'][name]:.1f}" for name in stages)
        lines.append(
            f"| {one['tokens']:,} | {times} | {one['cache_and_activations_mb']:,.0f} | {one['peak_mb_above_models']:,.0f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, help="answers of this length alone (default: 4,096 and 16,384)")
    parser.add_argument("--vocab", type=int, default=VOCAB, help="ids (default: %(default)s)")
    parser.add_argument("--rollouts", type=int, default=4, help="rollouts of the step (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object, of the longest answers")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if min(2 if arguments.tokens is None else arguments.tokens, arguments.vocab - 1, arguments.rollouts) < 2:
        parser.error("--tokens and --rollouts must be at least 2, --vocab at least 3")
    if arguments.here:
        print(json.dumps(measure(arguments.tokens, arguments.vocab, arguments.rollouts, progress=not arguments.quiet)))
        return 0
    lengths = LENGTHS if arguments.tokens is None else (arguments.tokens,)
    results = [child(tokens, arguments.vocab, arguments.rollouts, progress=not arguments.quiet) for tokens in lengths]
    print(table(results))
    words = missed(results)
    for line in words:
        print(f"missed: {line}")
    if arguments.json:
        print(json.dumps(results[-1]))
    return 1 if words else 0


if __name__ == "__main__":
    sys.exit(main())
