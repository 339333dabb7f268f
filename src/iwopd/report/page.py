"""The file: one HTML page that asks nothing of the network and trusts nothing that a model wrote.

Text reaches the page in two ways: through templates with autoescape on, and as JSON in `<script type="application/json">` with
every `<` escaped. The content-security policy allows exactly the scripts and the style sheets that are in the file, by their
hashes, and neither `unsafe-inline` nor `unsafe-eval`.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

import iwopd
from iwopd.filesystem import write_atomic
from iwopd.report.charts import DARK, LIGHT, MARKERS, Panel, dash_of
from iwopd.report.gathering import ReportData, folder_handoff, gather
from iwopd.report.panels import build_panels
from iwopd.report.probes import estimate
from iwopd.report.reading import ReportError, read_all, read_handoff, split_paths
from iwopd.report.text import SUBSCRIPTS, printable
from iwopd.runs.logs import Notes

MAX_TOKENS = 1_200_000
"""Response tokens in the token view: some 15 MB, so that a page stays below 20."""
SCRIPTS = ("vendor/plotly-basic.min.js", "page.js", "charts.js", "tokens.js")
GENERATOR = "iwopd report"


def write_report(
    runs: Sequence[Path],
    out: Path,
    *,
    probes: Sequence[Path] = (),
    handoff: Path | None = None,
    max_tokens: int = MAX_TOKENS,
    refresh: float | None = None,
) -> Path:
    """Write the page on these run directories and probes to `out` and return its path.

    A probe among `runs` is recognised by what is in it. `handoff` is the demo's hand-off curve; by default `handoff.json`
    beside the runs, if it is there. `refresh`: seconds after which the page loads itself again.
    """
    check_out(out)
    data = read_data(runs, probes=probes, handoff=handoff, max_tokens=max_tokens)
    text = render(data, build_panels(data), refresh=refresh)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, text)
    except OSError as error:
        raise ReportError(f"cannot write {printable(str(out))}: {error.strerror}; choose another file with -o") from None
    return out


def read_data(
    runs: Sequence[Path], *, probes: Sequence[Path] = (), handoff: Path | None = None, max_tokens: int = MAX_TOKENS
) -> ReportData:
    notes = Notes()
    found, measured = read_all(runs, probes, notes)
    curve = handoff or folder_handoff(split_paths(runs)[0])
    return gather(found, notes, read_handoff(curve, notes) if curve else None, max_tokens, measured)


def check_out(out: Path) -> None:
    """Refuse to write over something that is not a report."""
    if out.is_dir():
        raise ReportError(printable(f"{out} is a directory; give a file with -o, e.g. {out / 'report.html'}"))
    if out.exists():
        with out.open("rb") as file:
            if out.stat().st_size and GENERATOR.encode() not in file.read(4096):
                raise ReportError(printable(f"{out} is there and is not a report; choose another file with -o"))


def render(data: ReportData, panels: Sequence[Panel], *, refresh: float | None = None, made: datetime | None = None) -> str:
    """The page as text that UTF-8 can hold."""
    scripts = [_asset(name) for name in SCRIPTS]
    styles = [_asset("report.css") + _palette(), ""]
    charts = {chart.id: chart.as_json() for panel in panels for chart in panel.charts}
    blocks = {"charts": charts, **{panel.id: panel.data for panel in panels if panel.data is not None}}
    page = {"refresh": refresh, "light": LIGHT, "dark": DARK, "markers": MARKERS}
    template = _environment().get_template("page.html.j2")
    return template.render(
        title=_title(data),
        headline=next((panel.context["headline"] for panel in panels if panel.id == "summary"), ""),
        generator=f"{GENERATOR} {iwopd.__version__}",
        version=iwopd.__version__,
        made=(made or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC"),
        policy=_policy(scripts, styles),
        style=Markup(styles[0]),
        scripts=[Markup(script) for script in scripts],
        blocks={name: Markup(as_script_json(block)) for name, block in {"page": page, **blocks}.items()},
        panels=panels,
        groups=data.groups,
        probes=data.probes,
        legend_probes=data.compared if len(data.compared) > 1 else (),
        runs=data.runs,
        notes=data.notes.items,
        refresh=refresh,
    )


def as_script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever strings it holds; lone surrogates stay escaped."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def symbols(text: str) -> Markup:
    """Our words for the page, with the subscripts of log-probs as such; whatever else is in them is escaped."""
    shown = escape(printable(text))
    for plain, subscript in SUBSCRIPTS.items():
        shown = shown.replace(plain, Markup("lp<sub>{}</sub>").format(subscript))
    return shown


def _title(data: ReportData) -> str:
    if not data.runs:
        return data.probes[0].pair if len(data.probes) == 1 else f"{len(data.probes)} probes"
    if len(data.runs) == 1:
        return data.runs[0].name
    labels = [group.label for group in data.groups]
    return " · ".join(labels) if len(labels) <= 5 else f"{len(labels)} methods, {len(data.runs)} runs"


def policy_hash(text: str) -> str:
    """A script or style sheet in the file, as the content-security policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def _policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    inline = f"script-src {' '.join(map(policy_hash, scripts))}; style-src {' '.join(map(policy_hash, styles))}"
    nothing_else = "img-src data: blob:; connect-src 'none'; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; {inline}; {nothing_else}"


def _palette() -> str:
    """A CSS class per style, for chips and lines outside of charts."""
    colours = "".join(f"--s{n}:light-dark({light},{dark});" for n, (light, dark) in enumerate(zip(LIGHT, DARK, strict=True)))
    classes = ".sn{color:var(--text)}" + "".join(f".s{place}{{color:var(--s{place})}}" for place in range(len(LIGHT)))
    return f":root{{{colours}}}{classes}\n"


def _asset(name: str) -> str:
    return resources.files("iwopd.report").joinpath("assets", name).read_text(encoding="utf-8")


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("iwopd.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )
    environment.filters["points"] = lambda value: f"{value:+.1f}".replace("-", "−")
    environment.filters["percent"] = lambda value: f"{value:.1f}"
    environment.filters["p"] = lambda value: "< 0.001" if value < 0.001 else f"{value:.3f}"
    environment.filters["estimate"] = estimate
    environment.globals |= {"str_type": str, "int_type": int}
    environment.filters["symbols"] = symbols
    environment.globals["dash"] = dash_of
    environment.globals["colour"] = lambda style: "n" if style < 0 else style % len(LIGHT)
    return environment
