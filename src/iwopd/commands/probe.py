"""How strong is the position bias of a student and its teacher? Measured from the student's rollouts, without training: the
hand-off curve (the student begins, the teacher finishes), disagreement and prefix likelihood by position, what each weight rule
would do to these rollouts, how each rule's update points towards correct solutions, and what is left of an update if answers
stop earlier. Ends with a verdict in words, and a horizon that would do.

Only the hand-off curve needs answers, only the gradient alignment needs solutions; what cannot be measured is named.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iwopd.commands.engine_options import add_engine_options, engine_choice
from iwopd.commands.options import (
    CHAT_NAMES,
    CHAT_OPTIONS,
    add_chat_options,
    add_model_options,
    model_options,
    named_path,
    picked,
    rendering,
    words,
)

if TYPE_CHECKING:
    from iwopd.analysis.probe.inputs import Material, Pair

HELP = "measure the position bias of a student/teacher pair, without training"
EPILOG = """\
examples:
  iwopd probe --world clean
  iwopd probe --student Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-4B-Instruct-2507 --task math500 --limit 64 --max-tokens 4096
  iwopd probe --student ./student --teacher ./teacher --prompts prompts.jsonl --max-tokens 512 --skip alignment

prompts: JSONL with `prompt` or `messages`, and optionally `id`, `answer` (checked as math, or as --task does) and `solution`.
parts for --skip: handoff, positions, overlap, likelihood, rules, alignment, agreement, horizons.
docs/probe.md explains every number.
"""


MOST_BINS = 1000


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--student", help="local folder, hub id or GGUF file")
    parser.add_argument("--teacher", help="local folder, hub id or GGUF file")
    parser.add_argument("--world", help="embedded world instead of a pair: clean, drift or long")
    parser.add_argument("--lineage", type=int, default=0, help="which of the world's lineages (default: 0)")
    parser.add_argument("--student-size", default="medium", help="of the world's student (default: medium)")
    parser.add_argument("--teacher-size", default="strong", help="of the world's teacher (default: strong)")
    parser.add_argument("--prompts", type=named_path, metavar="FILE", help="JSONL file of prompts")
    parser.add_argument("--task", help="a task of `iwopd eval`: its problems, or with --prompts only its checker")
    parser.add_argument("--data", type=named_path, metavar="FILE", help="take the task's problems from a file")
    parser.add_argument("--no-chat", action="store_true", help="with --task: bare problems, for models without a chat template")
    add_chat_options(parser)
    parser.add_argument("--limit", "--prompts-count", type=int, default=256, help="only the first prompts (default: 256)")
    parser.add_argument("--samples", type=int, default=1, help="rollouts per prompt (default: 1)")
    parser.add_argument("--max-tokens", type=int, help="longest answer (default: the task's)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampling and log-probs (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling and of the bootstrap (default: 0)")
    parser.add_argument("--fractions", default="0,0.1,0.2,0.3,0.5,0.7,0.9", help="parts that the student writes, in [0, 1)")
    parser.add_argument("--continuations", type=int, default=4, metavar="K", help="of each prefix (default: 4)")
    parser.add_argument("--bins", type=int, default=10, help="parts of a response (default: 10)")
    parser.add_argument("--top-k", type=int, default=5, help="of the overlap (default: 5)")
    parser.add_argument("--drift", type=float, default=2.0, help="a token drifts if its gap is below minus this (default: 2)")
    parser.add_argument("--gamma", type=float, default=0.5, help="of IW-OPD, for the verdict (default: 0.5)")
    rule = "one more weight rule to look at, e.g. survival:tau=2,floor=0.1; may be repeated"
    parser.add_argument("--rule", action="append", default=[], metavar="NAME[:PARAM=VALUE,...]", help=rule)
    parser.add_argument("--batches", type=int, default=8, help="of gradients (default: 8)")
    parser.add_argument("--batch-size", type=int, default=32, help="prompts of such a batch (default: 32)")
    parser.add_argument("--skip", default="", metavar="PARTS", help="comma-separated parts to leave out")
    add_model_options(parser)
    add_engine_options(parser)
    add_engine_options(parser, "teacher")
    parser.add_argument("-o", "--output", type=named_path, help="result (default: probes/<student>-from-<teacher>/probe.json)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout, tables on stderr")


def run(options: argparse.Namespace, rest: list[str]) -> int:
    from rich.console import Console

    from iwopd.analysis.probe.present import print_probe
    from iwopd.analysis.probe.result import write_probe
    from iwopd.analysis.probe.run import run_probe
    from iwopd.runs.owner import owned
    from iwopd.stages import ConsoleStages

    _check(options)
    _settings(options, 1)  # wrong options are found before a model is loaded
    pair, material, name = _world(options) if options.world is not None else _models(options)
    settings = _settings(options, _max_tokens(options, material))
    out: Path = options.output or Path("probes") / name / "probe.json"
    parts = out.with_name(f"{out.name}.parts")
    with owned(parts, lambda words: print(words, file=sys.stderr), "name another result with -o"):
        with ConsoleStages() as progress:
            probe = run_probe(pair, material, settings, progress, keep=parts)
        write_probe(probe, out)
        shutil.rmtree(parts, ignore_errors=True)
    console = Console(stderr=options.json)
    print_probe(probe, console)
    console.print(f"result: {out}; see it: iwopd report {out.parent}", highlight=False, markup=False, soft_wrap=True)
    if options.json:
        print(probe.model_dump_json())
    return 0


def _check(options: argparse.Namespace) -> None:
    from iwopd.analysis.probe.result import ProbeError

    if options.limit < 1:
        raise ProbeError(f"--limit must be at least 1, got {options.limit}")
    if options.lineage < 0:
        raise ProbeError(f"--lineage must be at least 0, got {options.lineage}")
    if options.bins > MOST_BINS:
        raise ProbeError(f"--bins must be at most {MOST_BINS}, got {options.bins}")
    if options.output is not None and options.output.is_dir():
        raise ProbeError(f"-o {options.output} is a folder: name a file, such as {options.output / 'probe.json'}")
    if options.output is not None and (file := next((one for one in options.output.parents if one.is_file()), None)):
        raise ProbeError(f"-o {options.output} cannot be written: {file} is a file, not a folder")
    if options.world is not None:
        for name in ("student", "teacher", "prompts", "task", "data"):
            if getattr(options, name) is not None:
                raise ProbeError(f"--world brings models, prompts and checker: leave --{name} out")
        if any(value is not None for value in picked(options, *CHAT_OPTIONS).values()):
            raise ProbeError("--world brings rendered prompts: leave " + ", ".join(CHAT_NAMES) + " out")
        return
    if not (options.student and options.teacher):
        raise ProbeError("name a pair with --student and --teacher, or an embedded --world (clean, drift or long)")
    if options.prompts is None and options.task is None:
        raise ProbeError("name a file with --prompts or a --task of `iwopd eval`")
    if options.data is not None and (options.task is None or options.prompts is not None):
        raise ProbeError("--data is a task's file of problems: use it with --task and without --prompts")


def _settings(options: argparse.Namespace, max_tokens: int) -> Any:
    from iwopd.analysis.probe.result import ProbeError
    from iwopd.analysis.probe.settings import ProbeSettings

    try:
        fractions = tuple(float(word) for word in words(options.fractions))
    except ValueError:
        raise ProbeError(f"--fractions should look like 0,0.1,0.3, got {options.fractions!r}") from None
    same = ("samples", "temperature", "seed", "continuations", "bins", "top_k", "drift", "gamma", "batches")
    return ProbeSettings(
        max_tokens=max_tokens,
        fractions=fractions,
        batch_prompts=options.batch_size,
        rules=tuple(options.rule),
        skip=frozenset(words(options.skip)),
        engine=engine_choice(options),
        teacher_engine=engine_choice(options, "teacher"),
        **picked(options, *same),
    )


def _max_tokens(options: argparse.Namespace, material: Material) -> int:
    from iwopd.analysis.probe.result import ProbeError

    found = options.max_tokens if options.max_tokens is not None else material.max_tokens
    if found is None:
        raise ProbeError("--max-tokens is needed: a file of prompts does not say how long answers are")
    return int(found)


def _world(options: argparse.Namespace) -> tuple[Pair, Material, str]:
    from iwopd import tiny
    from iwopd.analysis.probe.inputs import open_pair, world_material
    from iwopd.analysis.probe.result import ProbeError
    from iwopd.train.progress import pretraining_progress

    sizes = {"teacher": options.teacher_size, "student": options.student_size}
    try:
        recipe = tiny.world_recipe(options.world, lineage=options.lineage, **sizes)
    except ValueError as error:
        raise ProbeError(f"--world: {error}") from None
    with pretraining_progress() as progress:
        world = tiny.open_world(recipe, progress=progress)
    lineage = f", lineage {options.lineage}" if options.lineage else ""
    names = (f"{options.world} {options.student_size} student{lineage}", f"{options.teacher_size} teacher")
    pair = open_pair(str(world.student), str(world.teacher), names=names, **model_options(options))
    folder = f"{options.world}-{options.student_size}-from-{options.teacher_size}"
    return pair, world_material(world, options.limit), f"{folder}-{options.lineage}" if options.lineage else folder


def _models(options: argparse.Namespace) -> tuple[Pair, Material, str]:
    from iwopd.analysis.probe.inputs import file_material, open_pair, task_material

    how = rendering(options)
    pair = open_pair(options.student, options.teacher, **model_options(options))
    if options.prompts is not None:
        material = file_material(options.prompts, pair.tokenizer, limit=options.limit, task=options.task, rendering=how)
    else:
        from_task = {"data": options.data, "limit": options.limit, "chat": not options.no_chat}
        material = task_material(options.task, pair.tokenizer, rendering=how, **from_task)
    student, teacher = (re.sub(r"[^\w.-]+", "-", Path(name).name) or "model" for name in (options.student, options.teacher))
    return pair, material, f"{student}-from-{teacher}"
