"""Rules of other packages, through real entry points of a real (if small) distribution on the path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from iwopd import algo
from iwopd.registry import Registry

PLUGIN = '''
import torch
from iwopd.algo import WeightRule

def half_life(gap, mask, *, tau=2.0):
    """exp(-S[t] / tau)"""
    before = gap.abs().cumsum(-1) - gap.abs()
    return torch.exp(-before / tau)

def second_half(mask, *, ratio=0.5):
    return mask & (mask.cumsum(-1) > ratio * mask.sum(-1, keepdim=True))

late = WeightRule("late", lambda gap, mask, *, ratio=0.5: second_half(mask, ratio=ratio).double(), supervised=second_half)

def plain(gap, mask, tau=2.0):
    return torch.full_like(gap, tau)

def needy(gap, mask, *, tau):
    return torch.full_like(gap, tau)

def wrong_shape(gap, mask):
    return gap.sum(-1)

number = 3
'''

ENTRY_POINTS = """[iwopd.weights]
half-life = my_rules:half_life
tardy = my_rules:late
plain = my_rules:plain
needy = my_rules:needy
wrong-shape = my_rules:wrong_shape
number = my_rules:number
broken = no_such_module:rule
uniform = my_rules:half_life
"""

SCRIPT = """
import sys, warnings
import torch
warnings.simplefilter("always")
from iwopd import algo
gap, mask = torch.tensor([[-1.0, 1.0, 2.0, 0.0]]), torch.tensor([[True, True, True, False]])
try:
    {statement}
except Exception as error:
    print(type(error).__name__, error)
print("imported" if "my_rules" in sys.modules else "not imported")
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    (tmp_path / "my_rules.py").write_text(PLUGIN)
    info = tmp_path / "my_rules-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-rules\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return tmp_path


def run(plugin: Path, statement: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(plugin)}
    command = [sys.executable, "-c", SCRIPT.format(statement=statement)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_function_becomes_a_rule(plugin: Path) -> None:
    out = run(plugin, "print(algo.token_weights('half-life', gap, mask, tau=1.0).log().tolist())")
    assert "[[0.0, -1.0, -2.0, -inf]]" in out
    assert "imported" in out


def test_parameters_and_formula_come_from_the_function(plugin: Path) -> None:
    out = run(plugin, "rule = algo.WEIGHT_RULES['half-life']; print(rule.params, rule.formula, rule.source)")
    assert "{'tau': 2.0} exp(-S[t] / tau) my_rules:half_life" in out


def test_a_rule_object_brings_its_supervised_tokens(plugin: Path) -> None:
    out = run(plugin, "print(algo.supervised_mask('tardy', mask, ratio=0.4).tolist())")
    assert "[[False, True, True, False]]" in out


def test_any_parameter_with_a_default_counts(plugin: Path) -> None:
    assert "[[3.0, 3.0, 3.0, 0.0]]" in run(plugin, "print(algo.token_weights('plain', gap, mask, tau=3.0).tolist())")
    assert "its parameter 'tau' is no evidence" in run(plugin, "algo.token_weights('needy', gap, mask)")
    assert "tardy" in run(plugin, "print(algo.WEIGHT_RULES['tardy'].name)")


def test_the_table_of_methods_survives_a_broken_plugin(plugin: Path) -> None:
    out = run(plugin, 'from iwopd.cli import main; main(["methods"])')
    assert "broken: weight rule 'broken' could not be loaded" in out
    assert "half-life" in out


def test_names_are_listed_without_importing_anything(plugin: Path) -> None:
    out = run(plugin, "print(sorted(set(algo.WEIGHT_RULES)), 'broken' in algo.WEIGHT_RULES)")
    assert "'half-life'" in out
    assert "not imported" in out


def test_a_broken_plugin_harms_only_its_users(plugin: Path) -> None:
    assert "[[1.0, 1.0, 1.0, 0.0]]" in run(plugin, "print(algo.token_weights('uniform', gap, mask).tolist())")
    message = "ImportError weight rule 'broken' could not be loaded from no_such_module:rule: ModuleNotFoundError"
    assert message in run(plugin, "algo.token_weights('broken', gap, mask)")


def test_built_in_names_cannot_be_taken_over(plugin: Path) -> None:
    out = run(plugin, "print(algo.token_weights('uniform', gap, mask).tolist(), len(algo.WEIGHT_RULES))")
    assert "[[1.0, 1.0, 1.0, 0.0]]" in out
    assert "weight rule 'uniform' of my_rules:half_life is ignored: the name is taken" in out


def test_what_a_plugin_returns_is_checked(plugin: Path) -> None:
    assert "returned shape [1] for a mask [1, 4]" in run(plugin, "algo.token_weights('wrong-shape', gap, mask)")
    assert "must be a function or an instance of WeightRule, got 3" in run(plugin, "algo.token_weights('number', gap, mask)")


def test_built_in_rules_say_what_they_are() -> None:
    names = ["uniform", "cumulative-share", "signed", "ideal", "fixed-prefix", "linear-decay"]
    names += ["curriculum", "prefix-only", "suffix-only", "survival"]
    assert list(algo.WEIGHT_RULES)[: len(names)] == names
    for name in names:
        rule = algo.WEIGHT_RULES[name]
        assert rule.name == name
        assert rule.formula
        assert rule.source
    assert algo.WEIGHT_RULES["cumulative-share"].params == {"gamma": 0.5, "total": "paper", "blend": True}
    assert algo.WEIGHT_RULES["curriculum"].params == {"start": 0.3, "end": 1.0, "schedule": "cosine", "factor": 1.5}
    assert algo.WEIGHT_RULES["ideal"].params == {"alpha": 0.01, "gamma": None}


def test_a_name_is_registered_once() -> None:
    things: Registry[int] = Registry("thing", "iwopd.no_such_group", lambda name, loaded, where: int(loaded))
    things.add("one", 1)
    with pytest.raises(ValueError, match="thing 'one' is registered already"):
        things.add("one", 1)
    with pytest.raises(KeyError, match="unknown thing 'on'; did you mean 'one'"):
        things["on"]
