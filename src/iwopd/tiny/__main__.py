"""Pretrain one model: `python -m iwopd.tiny FOLDER < recipe.json`, one JSON line of progress every few steps.

A separate process with one thread: two models train in parallel on two cores, and the weights do not depend on how many
threads the parent uses. If the parent dies, writing the next line of progress fails and this process ends.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from iwopd.tiny.architecture import ModelRecipe
from iwopd.tiny.pretrain import pretrain
from iwopd.tiny.tokenizer import build_tokenizer


def main(folder: Path, recipe: ModelRecipe) -> None:
    """Pretrain and save with the tokenizer."""
    model = pretrain(recipe, lambda _, step, steps, loss: print(json.dumps([step, steps, loss]), flush=True))
    model.save_pretrained(folder)
    build_tokenizer(recipe.tokenizer).save_pretrained(folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), ModelRecipe.from_dict(json.load(sys.stdin)))
