"""Run docs/tutorial.ipynb and keep its outputs: `python tools/run_notebook.py [OUT]`; without OUT in the file itself."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tutorial.ipynb"
NO_WIDGETS = "ignore:IProgress not found"  # tqdm's word about a package for progress bars, which the notebook does not show


def run_notebook(notebook: Path) -> Any:
    """The notebook with its outputs, run in an empty folder; an error in a cell is an error here."""
    cells = nbformat.read(notebook, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            cells, timeout=None, kernel_name="python3", resources={"metadata": {"path": folder}}, coalesce_streams=True
        )
        client.execute(env={**os.environ, "PYTHONWARNINGS": NO_WIDGETS})
    for cell in cells.cells:
        cell.metadata.pop("execution", None)  # times, which differ in every run
    cells.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return cells


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else NOTEBOOK
    nbformat.write(run_notebook(NOTEBOOK), out)
    print(f"{out}: {out.stat().st_size / 1000:.0f} kB")
