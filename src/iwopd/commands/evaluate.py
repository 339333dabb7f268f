r"""Evaluate a model. Each task brings its protocol (aime24, aime25, hmmt25, math500, gsm8k: 32 samples at temperature 1, last
\boxed{} up to symbolic equivalence; humaneval+, mbpp+: greedy, EvalPlus's tests in a sandbox; tiny: the embedded world);
--samples and --temperature override it. Sampling noise depends on seed, problem and sample alone, so that two models can be
compared problem by problem: `iwopd compare`.

Finished samples are kept in the folder --out; a re-run goes on with what is missing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iwopd.commands.engine_options import add_engine_options, engine_choice
from iwopd.commands.options import add_chat_options, add_model_options, model_options, named_path, picked, rendering, words

if TYPE_CHECKING:
    from iwopd.data.chat import Rendering

HELP = "evaluate a model on math, code or your own tasks"
EPILOG = """\
examples:
  iwopd eval --model runs/iw-opd-seed0 --tasks tiny
  iwopd eval --model Qwen/Qwen3-0.6B --tasks aime24,aime25 --samples 32 --device cuda --dtype bfloat16
  iwopd eval --model ./model --tasks gsm8k --data gsm8k=test.jsonl --limit 100 --max-tokens 1024
  iwopd eval --model ./model --tasks my-task.toml
  iwopd eval --model ./model --tasks math500 --engine server --engine-option url=http://gpu1:8000

data: --data TASK=FILE (JSONL or parquet with id, problem, answer; code: EvalPlus's files), else a file in the folder that
IWOPD_DATA names, else the Hugging Face hub (math) or EvalPlus's releases (code).
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, help="local folder, hub id, GGUF file, or a run directory (its newest checkpoint)"
    )
    parser.add_argument("--step", type=int, help="with a run directory: the checkpoint of this step")
    parser.add_argument("--tasks", required=True, help="comma-separated names or TOML files")
    parser.add_argument("--samples", type=int, help="samples per problem (default: the task's)")
    parser.add_argument("--temperature", type=float, help="0: greedy, one sample (default: the task's)")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling (default: 1, off)")
    parser.add_argument("--top-k", type=int, default=0, help="keep the k likeliest ids (default: 0, off)")
    parser.add_argument("--max-tokens", type=int, help="longest answer (default: the task's; 16384 for math and code)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling noise; equal for models to be compared")
    parser.add_argument("--limit", type=int, help="only the first problems of each task")
    parser.add_argument("--data", action="append", default=[], metavar="TASK=FILE", help="take a task's problems from a file")
    add_chat_options(parser, "as a run trained, else ")
    parser.add_argument("--no-chat", action="store_true", help="bare problems, for base models without a chat template")
    add_model_options(parser)
    add_engine_options(parser)
    parser.add_argument("--unsafe-no-sandbox", action="store_true", help="run generated code unprotected (do not)")
    parser.add_argument("--out", type=named_path, help="folder of the evaluation (default: evals/<model>)")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object, last")


def run(options: argparse.Namespace, rest: list[str]) -> int:
    from iwopd.eval.present import print_results
    from iwopd.eval.session import Request, run_evaluation
    from iwopd.stages import ConsoleStages

    model, label, name, trained = _model(options.model, options.step)
    request = Request(
        model=model,
        tasks=words(options.tasks),
        chat=not options.no_chat,
        data=_data(options.data),
        unsafe=options.unsafe_no_sandbox,
        engine=engine_choice(options),
        rendering=rendering(options, trained),
        label=label,
        **picked(options, "samples", "temperature", "top_p", "top_k", "max_tokens", "seed", "limit"),
        **model_options(options),
    )
    out: Path = options.out or Path("evals") / name
    with ConsoleStages() as progress:
        results = run_evaluation(request, out, progress)
    print_results(results, out, as_json=options.json)
    return 0


def _data(given: Sequence[str]) -> dict[str, Path]:
    from iwopd.eval.session import RequestError

    for word in given:
        if not word.partition("=")[2]:
            raise RequestError(f"--data {word!r} should look like --data aime25=problems.jsonl")
    return {name: Path(path) for name, _, path in (word.partition("=") for word in given)}


def _model(text: str, step: int | None) -> tuple[str, dict[str, Any], str, Rendering | None]:
    """Path or id of the model, its labels, a name for the folder, and how prompts were rendered in training.

    A run directory stands for one of its checkpoints.
    """
    from iwopd.eval.session import RequestError
    from iwopd.methods import method_title
    from iwopd.runs.directory import RunDirectory
    from iwopd.runs.identity import student_name
    from iwopd.train.chats import eval_rendering
    from iwopd.train.checkpoint import CheckpointStore

    path = Path(text)
    if not (path / "run.json").exists():
        if step is not None:
            raise RequestError(f"--step needs a run directory, and {text} is none")
        return text, {}, path.name or "model", None
    config = RunDirectory(path).config()
    store = CheckpointStore(path / "checkpoints")
    checkpoint = store.latest() if step is None else store.open(step)
    if checkpoint is None:
        raise RequestError(f"{text} has no valid checkpoint yet")
    student = student_name(config.models.model_dump())
    label = {"method": method_title(config.method.model_dump()), "student": student, "train_seed": config.seed}
    return str(checkpoint.model_path), label, f"{path.name}-step{checkpoint.step}", eval_rendering(config)
