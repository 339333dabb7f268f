"""docs/results.md against the raw results: its tables are what the commands print from `results/`, letter by letter."""

from __future__ import annotations

from pathlib import Path

import pytest

from iwopd.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").splitlines()
ASIDE = ("| tried on even lineages", "Rank correlation, ", "| --- ")
"""What a command prints and the page leaves out."""


@pytest.mark.parametrize(
    "words",
    [
        "prediction",
        "gate --world drift --first-lineage 12 --problems 500",
        "gate --world clean --first-lineage 12 --problems 500",
        "gate --world long --first-lineage 16 --problems 300",
        "rivals --world drift --first-lineage 12 --problems 500",
    ],
)
def test_tables_and_sentences_are_those_of_the_records(words: str, tmp_path: Path) -> None:
    printed = tmp_path / "printed.md"
    command = ["reproduce", *words.split(), "--read-only", "--results", str(ROOT / "results"), "--markdown", str(printed)]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--out", str(tmp_path / "none")])
    assert ended.value.code == 0
    tables = printed.read_text(encoding="utf-8").partition("\n*Paper: ")[2].split("\n\n")[1:]
    kept = [
        line for table in tables if not table.startswith(ASIDE) for line in table.splitlines() if not line.startswith(ASIDE)
    ]
    assert len(kept) > 5
    lost = [line for line in kept if line not in PAGE]
    assert not lost
