"""The student's own weights as a teacher or reference: `live`, `base` under its adapter, and their average `ema`.

All run in the student's precision, so that one that has not moved has the student's log-probs to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator

from iwopd.adapters import adapter_off
from iwopd.lm import Context
from iwopd.train.average import Average


def own_weights(weights: str, student: Any, average: Average | None, accelerator: Accelerator) -> tuple[Any, Context]:
    """The model that scores with these weights of the student, and the context in which it runs."""
    if weights == "ema":
        if average is None:
            raise ValueError("nobody keeps an average of the student")
        return average.model, _autocast(average, accelerator)
    if weights == "live":
        return student, accelerator.autocast

    @contextmanager
    def before_training() -> Iterator[None]:
        with accelerator.autocast(), adapter_off(student):
            yield

    return student, before_training


def _autocast(average: Average, accelerator: Accelerator) -> Context:
    """The student's, on the device of the average: accelerate's is of its own device alone."""
    kind = next(average.model.parameters()).device.type
    own: Context = accelerator.autocast
    elsewhere = accelerator.mixed_precision != "no" and kind != accelerator.device.type
    return partial(torch.autocast, kind, torch.bfloat16) if elsewhere else own
