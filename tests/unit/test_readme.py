"""The README's example does what its comment says, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_library_example_runs_and_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    promised = re.search(r"print\(weights\)\s+# (.*)", code)
    assert promised is not None
    printed = capsys.readouterr().out
    assert torch.equal(names["weights"], torch.tensor(eval(promised.group(1))))
    assert "1.1250" in printed
    assert names["logprobs"].grad is not None  # type: ignore[attr-defined]


def test_targets_of_the_makefile_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in README
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
