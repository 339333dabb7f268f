"""Figures for papers: the page's charts with matplotlib, in column widths, with embedded fonts and colour-blind-safe styles."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import MultipleLocator

from iwopd.report.charts import LIGHT, MARKERS, Axis, Chart, Panel, Series, Values, dash_of, row_offset
from iwopd.report.gathering import ReportData
from iwopd.report.page import read_data
from iwopd.report.panels import build_panels
from iwopd.report.reading import ReportError
from iwopd.report.sheets import Cell, sheets
from iwopd.report.text import SUBSCRIPTS, printable
from iwopd.runs.logs import Notes

COLUMN, PAGE = 3.25, 6.75
"""Inches: one column and the full width of a two-column page."""
FORMATS = ("pdf", "svg", "png")
Format = Literal["pdf", "svg", "png"]
LAYOUTS = ("charts", "paper")
Layout = Literal["charts", "paper"]

STYLE: Any = {
    "pdf.fonttype": 42,  # TrueType, as journals ask: text stays text
    "svg.fonttype": "path",
    "svg.hashsalt": "iwopd",  # the same numbers give the same file
    "font.family": "DejaVu Sans",  # comes with matplotlib, so figures are the same on every machine
    "text.parse_math": False,  # a run may be called $x$
    "axes.titlesize": 8,
    **dict.fromkeys(("font.size", "axes.labelsize"), 7.5),
    **dict.fromkeys(("legend.fontsize", "xtick.labelsize", "ytick.labelsize"), 7),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.linewidth", "xtick.major.width", "ytick.major.width"), 0.6),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 2.5),
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.2,
    "legend.handlelength": 2.6,
    "hatch.linewidth": 0.5,
    "savefig.dpi": 300,
}
LINES: dict[str, Any] = {
    "solid": "-",
    "dash": (0, (4.5, 1.8)),
    "dot": (0, (1.2, 1.4)),
    "dashdot": (0, (4.5, 1.6, 1.2, 1.6)),
    "longdash": (0, (8, 2)),
    "longdashdot": (0, (8, 2, 1.2, 2)),
}
SIGNS = dict(zip(MARKERS, ("o", "s", "D", "^", "P", "X", "v", "*"), strict=True))
HATCHES = ("", "////", "xxxx", "....")
STAGE_TONES = tuple(LIGHT[place] for place in (0, 4, 5, 2))
LEVEL: Any = {"color": "#555555", "linewidth": 0.8, "linestyle": LINES["dot"]}
LEVEL_TEXT: Any = {"fontsize": 7, "color": "#555555"}
"""Reference lines and their labels."""


def write_figures(
    runs: Sequence[Path],
    folder: Path,
    *,
    probes: Sequence[Path] = (),
    file_format: Format = "pdf",
    layout: Layout = "charts",
    handoff_file: Path | None = None,
) -> tuple[list[Path], Notes]:
    """One file per chart in one column's width, one sheet per panel in the page's width; also what was missing.

    With the layout `paper`, figures 1 to 4 of the paper instead, in the page's width.
    """
    if file_format not in FORMATS:
        raise ReportError(f"unknown format {file_format!r}; choose from {', '.join(FORMATS)}")
    if layout not in LAYOUTS:
        raise ReportError(f"unknown layout {layout!r}; choose from {', '.join(LAYOUTS)}")
    data = read_data(runs, probes=probes, handoff=handoff_file)
    figures = _paper_figures(data) if layout == "paper" else _chart_figures(build_panels(data, charts_only=True))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _style():
            written = [_save(figure, folder / f"{name}.{file_format}") for name, figure in figures]
    except OSError as error:
        raise ReportError(f"cannot write figures to {printable(str(folder))}: {error.strerror}; choose another -o") from None
    if not written:
        raise ReportError("there is nothing to draw: no evaluation, no metric and no probe's curve could be read")
    return written, data.notes


def write_chart(chart: Chart, path: Path) -> Path:
    """One chart in a column's width; the format is the file name's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _style():
        return _save(_figure(chart), path)


def _paper_figures(data: ReportData) -> Iterator[tuple[str, Figure]]:
    for name, cells in sheets(data).items():
        if all(cell.chart is None for cell in cells):
            data.notes.add(name, f"nothing to draw; it needs {'; or '.join(cell.needs for cell in cells)}")
        else:
            yield name, _sheet(cells)


def draw(axes: Axes, chart: Chart, *, title: bool = True) -> None:
    """One chart into given axes."""
    if chart.kind == "stack":
        _bars(axes, chart)
    elif chart.kind == "dots":
        _dots(axes, chart)
    else:
        for series in chart.series:
            _line(axes, series, chart)
        for label, height in chart.lines:
            axes.axhline(height, **LEVEL)
            corner: Any = ("axes fraction", "data")
            above = chart.label_above(height)
            lift: Any = {
                "xytext": (0, 1.5 if above else -1.5),
                "textcoords": "offset points",
                "va": "bottom" if above else "top",
            }
            axes.annotate(_plain(label), (0.015, height), xycoords=corner, ha="left", **lift, **LEVEL_TEXT)
        _limits(axes, chart)
    _symbols(axes.set_xlabel(_named(chart.x)))
    _symbols(axes.set_ylabel(_named(chart.y)))
    if title:
        _symbols(axes.set_title(_plain(chart.title), loc="left"))


def _chart_figures(panels: Sequence[Panel]) -> Iterator[tuple[str, Figure]]:
    for panel in panels:
        yield from ((chart.id, _figure(chart)) for chart in panel.charts)
        charts = [chart for chart in panel.charts if chart.kind == "lines"]  # bars have another legend: they stay by themselves
        if len(charts) > 1 and not any(
            chart.keys for chart in charts
        ):  # charts with legends of their own share no sheet either
            yield f"panel-{panel.id}", _grid(charts, 2 if panel.id == "position" else min(3, len(charts)))


def _grid(charts: Sequence[Chart], columns: int) -> Figure:
    rows = math.ceil(len(charts) / columns)
    figure = Figure(figsize=(PAGE, 1.75 * rows + 0.4), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for axes, chart in zip_longest(grid, charts):
        if chart is None:
            axes.set_axis_off()
        else:
            draw(axes, chart)
    _legend(figure, grid[0], 4)
    return figure


def _figure(chart: Chart) -> Figure:
    figure = Figure(figsize=(COLUMN, _rows_height(chart) if chart.kind == "dots" else 2.35), layout="constrained")
    axes = figure.add_subplot()
    draw(axes, chart, title=False)  # a paper has captions
    _legend(figure, axes, 2)
    return figure


def _sheet(cells: Sequence[Cell]) -> Figure:
    """The paper's arrangement: side by side, lettered, each with its own legend below."""
    figure = Figure(figsize=(PAGE, 2.7), layout=ConstrainedLayoutEngine(w_pad=0.06, wspace=0.04))
    grid = figure.subplots(1, len(cells), squeeze=False)[0]
    for letter, axes, cell in zip("abc", grid, cells, strict=False):
        _cell(axes, cell)
        axes.set_title(f"({letter}) {_plain(cell.title)}", loc="left", fontweight="bold", fontsize=7.5)
    return figure


def _cell(axes: Axes, cell: Cell) -> None:
    if cell.chart is None:
        axes.grid(visible=False)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(True)
        axes.spines[:].set_color("#e2e2e2")
        words = textwrap.fill(f"no data: needs {cell.needs}", 24)
        axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color="#b0b0b0")
        return
    draw(axes, cell.chart, title=False)
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        columns = 2 if max(len(label) for label in labels) <= 16 else 1
        looks: Any = {"fontsize": 6.5, "handlelength": 2.2, "columnspacing": 1.0, "bbox_to_anchor": (0.5, -0.24)}
        axes.legend(handles, labels, loc="upper center", ncols=columns, **looks)


def _dots(axes: Axes, chart: Chart) -> None:
    """A dot with an interval for every row and series; hollow where the interval holds zero."""
    for label, place in chart.lines:
        axes.axvline(place, **LEVEL)
        corner: Any = ("data", "axes fraction")
        axes.annotate(_plain(label), (place, 1.0), xycoords=corner, ha="center", va="bottom", **LEVEL_TEXT)
    axes.axvline(0.0, color="#999999", linewidth=0.6)
    for turn, series in enumerate(chart.series):
        colour, sign = _look(series)
        for row, value in enumerate(series.y):
            if value is None:
                continue
            height = row + row_offset(turn, len(chart.series))
            ends = [value if column is None or (end := column[row]) is None else end for column in (series.low, series.high)]
            axes.plot(ends, [height, height], color=colour, linewidth=1.1, solid_capstyle="butt")
            face = colour if chart.filled(series, row) else "white"
            axes.plot([value], [height], sign, color=colour, markerfacecolor=face, markeredgewidth=0.9, markersize=3.6)
        axes.plot([], [], sign, color=colour, markersize=3.6, linestyle="-", label=_plain(series.label))
    axes.set_yticks(range(len(chart.bars)), [_plain(bar) for bar in chart.bars])
    axes.set_ylim(len(chart.bars) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    if chart.x.zero and axes.get_xlim()[0] < 0 and not _negative(chart):
        axes.set_xlim(left=0.0)


def _rows_height(chart: Chart) -> float:
    """Inches."""
    return 0.65 + len(chart.bars) * (0.155 if len(chart.series) == 1 else 0.1 + 0.07 * len(chart.series))


def _line(axes: Axes, series: Series, chart: Chart) -> None:
    colour, sign = _look(series)
    few = chart.markers and len(series.x) <= 60 and series.dash is None
    axes.plot(
        series.x,
        _numbers(series.y),
        color=colour,
        linestyle=LINES[dash_of(series.style, series.dash)],
        linewidth=1.3 if series.legend else 0.9,
        marker=sign if few or len(series.x) == 1 else None,
        label=_plain(series.label) if series.legend else "_nolegend_",
    )
    if series.low is not None and series.high is not None:
        low, high = _numbers(series.low), _numbers(series.high)
        axes.fill_between(list(series.x), low, high, color=colour, alpha=0.15, linewidth=0)


def _look(series: Series) -> tuple[str, str]:
    """Colour and marker."""
    turn = max(0, series.style)
    return "#222222" if series.style < 0 else LIGHT[turn % len(LIGHT)], SIGNS[MARKERS[turn % len(MARKERS)]]


def _numbers(values: Values) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _bars(axes: Axes, chart: Chart) -> None:
    places = list(range(len(chart.bars)))
    left = [0.0] * len(places)
    for turn, series in enumerate(chart.series):
        values = [value or 0.0 for value in series.y]
        looks: Any = {
            "color": STAGE_TONES[turn % len(STAGE_TONES)],
            "hatch": HATCHES[turn % len(HATCHES)],
            "edgecolor": "white",
        }
        axes.barh(places, values, left=left, height=0.55, linewidth=0.4, label=_plain(series.label), **looks)
        left = [before + value for before, value in zip(left, values, strict=True)]
    axes.set_yticks(places, [_plain(bar) for bar in chart.bars])
    axes.invert_yaxis()
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")


def _limits(axes: Axes, chart: Chart) -> None:
    if chart.x.range:
        axes.set_xlim(*chart.x.range)
    if chart.y.tick:
        axes.yaxis.set_major_locator(MultipleLocator(chart.y.tick))
    if chart.y.range:
        axes.set_ylim(*chart.y.range)
    elif chart.y.zero:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]) if axes.get_ylim()[0] < 0 and _negative(chart) else 0.0)


def _negative(chart: Chart) -> bool:
    return any(value is not None and value < 0 for series in chart.series for value in series.y)


def _legend(figure: Figure, axes: Axes, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        entry = 0.4 + 0.048 * max(len(label) for label in labels)  # inches, roughly
        fitting = max(1, int(figure.get_figwidth() // entry))
        figure.legend(handles, labels, loc="outside upper center", ncols=min(columns, fitting, len(handles)))


def _named(axis: Axis) -> str:
    return _plain(f"{axis.title} (%)" if axis.percent else axis.title)


def _symbols(text: Text) -> None:
    """Set the subscripts of our own words as such; a dollar sign stays one."""
    words = text.get_text()
    if any(plain in words for plain in SUBSCRIPTS):
        words = words.replace("$", r"\$")
        for plain, subscript in SUBSCRIPTS.items():
            words = words.replace(plain, rf"lp$_\mathrm{{{subscript}}}$")
        text.set_parse_math(True)
        text.set_text(words)


def _plain(text: str) -> str:
    """Without the leading underscore that hides a label from legends."""
    return (" " if text.startswith("_") else "") + printable(text).replace("\n", " ")


def _save(figure: Figure, path: Path) -> Path:
    metadata: dict[str, Any] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}[path.suffix[1:]]
    figure.savefig(path, metadata=metadata)
    return path


@contextmanager
def _style() -> Iterator[None]:
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a run may be called anything
        yield
