"""A notebook as a Markdown page: its text, its code, and the outputs that are kept in it."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import nbformat


def notebook_page(notebook: Path, figures: Path) -> str:
    """The page of a notebook; pictures among its outputs are written to the folder `figures`, which lies beside the page."""
    cells = nbformat.read(notebook, as_version=4).cells
    parts = [f"*This page is a notebook: `docs/{notebook.name}` in the repository. Its outputs are those of a real run.*"]
    for number, cell in enumerate(cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.cell_type == "code":
            parts.append(_fenced(cell.source, "python"))
            parts += [
                _output(output, figures, f"{notebook.stem}-{number}-{place}") for place, output in enumerate(cell.outputs)
            ]
    title, *rest = parts[1:]
    heading, _, text = title.partition("\n")
    return "\n\n".join([heading, parts[0], text.strip(), *rest]) + "\n"


def _output(output: Any, figures: Path, name: str) -> str:
    if output.output_type == "stream":
        return _fenced(output.text.rstrip("\n"), "text")
    if output.output_type == "error":
        raise ValueError(
            f"the notebook keeps an error: {output.ename}: {output.evalue}. Run it again: python tools/run_notebook.py"
        )
    data = output.data
    if "image/png" in data:
        figures.mkdir(parents=True, exist_ok=True)
        (figures / f"{name}.png").write_bytes(base64.b64decode(data["image/png"]))
        return f"![Output of the cell above](figures/{name}.png)"
    if "text/html" in data:
        html = re.sub(r"\n\s*\n", "\n", data["text/html"]).strip()  # an empty line would end the block
        return f'<div class="notebook-output">\n{html}\n</div>'
    return _fenced(data["text/plain"], "text")


def _fenced(text: str, language: str) -> str:
    return f"````{language}\n{text}\n````"
