"""A model's mode: train or eval, and what is random in training only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

RANDOM = ("drop", "jitter")
"""Parts of the names of rates that act in training only: dropout, layer drop, stochastic depth, noise of routers."""


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """Everything in eval mode; afterwards each module is in its old mode again, also where parts of a model differed."""
    with _mode(False, *models):
        yield


@contextmanager
def train_mode(*models: nn.Module) -> Iterator[None]:
    """Everything in training mode; afterwards as before."""
    with _mode(True, *models):
        yield


@contextmanager
def _mode(training: bool, *models: nn.Module) -> Iterator[None]:
    others = [module for model in models for module in model.modules() if module.training != training]
    for model in models:
        model.train(training)
    try:
        yield
    finally:
        for module in others:
            module.training = not training


def switch_off_dropout(model: nn.Module) -> None:
    """Set every rate of randomness to 0, so that training mode computes what eval mode does.

    The update must see the policy that wrote the rollouts: with dropout the first ratio would not be 1. Rates stand in modules
    (`nn.Dropout.p`), in attributes of layers, and in configs that layers read as they run; a saved config has them as 0, too.
    """
    holders: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        holders |= {id(holder): holder for holder in (module, config) if holder is not None}
    for holder in holders.values():
        own = "drop" in type(holder).__name__.lower()  # Dropout, DropPath, LayerDrop, whoever wrote them
        for name, value in list(vars(holder).items()):
            if isinstance(value, float) and (any(part in name for part in RANDOM) or (own and name in ("p", "prob", "rate"))):
                setattr(holder, name, 0.0)
