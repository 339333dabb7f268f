"""Copy the student of a run to a folder that transformers loads, with its tokenizer and model card. A LoRA student is an
adapter (peft and its base model are needed to load it); --merge adds it into the base model's weights.
"""

from __future__ import annotations

import argparse

from iwopd.commands.options import named_path

HELP = "a trained student as a folder for from_pretrained"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=named_path, help="run directory (its newest checkpoint), or one of its checkpoints")
    parser.add_argument("out", type=named_path, help="folder to write; must not exist")
    parser.add_argument("--merge", action="store_true", help="add an adapter into the weights")
    parser.add_argument("--step", type=int, help="checkpoint of this step instead of the newest")


def run(options: argparse.Namespace, _rest: list[str]) -> int:
    from iwopd.train.export import export

    written = export(options.source, options.out, merged=options.merge, step=options.step)
    print(f"{written}: {options.out}")
    return 0
