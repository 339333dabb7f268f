"""The parameters of a model card: every method's can be written as TOML, defaults included."""

from __future__ import annotations

import tomllib

import pytest

from iwopd.config import make_config
from iwopd.methods import METHODS
from iwopd.train.card import _parameters


@pytest.mark.parametrize("name", METHODS)
def test_every_methods_parameters_are_toml(name: str) -> None:
    config = make_config({"models": {"world": "clean"}, "method": METHODS[name]})
    written = tomllib.loads(_parameters(config))
    assert written["optim"]["lr"] == config.optim.lr
    known = {**config.method.made.rule.params, **config.method.made.params}
    assert written["method"]["params"] == {key: value for key, value in known.items() if value is not None}
