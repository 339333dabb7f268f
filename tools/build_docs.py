"""Build the documentation site: `make docs`, or `python tools/build_docs.py [--out DIR]`.

    repository --gather--> OUT/source --zensical, strict--> OUT/site

`source` mirrors the repository: a page lies where its file lies, so relative links work in both. Pages that nobody writes are
made here: the command-line and API references, the tutorial from its notebook, a page for every source file that a page links
to, and the report of a recorded demo. The generator checks links: a page, an anchor or a name of the API that does not exist
ends the build.

Left out: publishing. `site` opens from disk and needs no network; its search wants a server, for which Python's own will do.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from example_records import unpacked
from notebook_page import notebook_page
from reference_pages import reference_pages

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LOG.md")
CONFIG = ROOT / "docs" / "zensical.toml"
STYLE = ROOT / "docs" / "site.css"
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2`* *$", re.MULTILINE | re.DOTALL)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # which the generator prints into files too
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".json": "json", ".sh": "bash"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs", help="replaced (default: build/docs)")
    out: Path = parser.parse_args().out.resolve()
    gather(out / "source")
    build(out)
    print(f"docs: open {out / 'site' / 'index.html'}")
    print(f"with search: python -m http.server --bind 127.0.0.1 --directory {out / 'site'}, then open http://127.0.0.1:8000")


def gather(source: Path) -> None:
    """Bring all pages together in `source`, which is replaced."""
    shutil.rmtree(source, ignore_errors=True)
    made = {Path("docs/reference") / name: text for name, text in reference_pages().items()}
    made[Path("docs/tutorial.md")] = notebook_page(ROOT / "docs" / "tutorial.ipynb", source / "docs" / "figures")
    for path, text in made.items():
        _write(source / path, text)
    shutil.copy(STYLE, source / "docs" / STYLE.name)
    waiting = [Path(page) for page in PAGES] + [page.relative_to(ROOT) for page in sorted((ROOT / "docs").glob("*.md"))]
    done: set[Path] = set()
    while waiting:
        page = waiting.pop()
        if page in done:
            continue
        done.add(page)
        text, linked = with_site_links((ROOT / page).read_text(encoding="utf-8"), page, set(made))
        _write(source / page, text)
        for target in linked:
            if target.suffix == ".md":
                waiting.append(target)
            else:
                _gather_file(target, source)
    _write_example(source / "docs" / "example" / "report.html")


def with_site_links(text: str, page: Path, made: set[Path]) -> tuple[str, list[Path]]:
    """The text of `page` with links as the site has them, and the files of the repository that it links to."""
    linked: list[Path] = []

    def site_link(found: re.Match[str]) -> str:
        target, _, anchor = found[2].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return found[0]
        path = Path(os.path.normpath(page.parent / target))
        if path.suffix == ".ipynb":
            target, path = target.removesuffix(".ipynb") + ".md", path.with_suffix(".md")
        if path in made or not (ROOT / path).exists():  # the generator says what does not exist
            return f"{found[1]}{target}{'#' * bool(anchor)}{anchor}{found[3]}"
        if (ROOT / path).is_dir():
            target, path = f"{target.rstrip('/')}/README.md", path / "README.md"
            linked.append(path if (ROOT / path).exists() else path.parent)
        else:
            linked.append(path)
            target += ".md" * _is_source(path)
        return f"{found[1]}{target}{'#' * bool(anchor)}{anchor}{found[3]}"

    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(site_link, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(site_link, text[end:])]), linked


def build(out: Path) -> None:
    """Run the generator on what was gathered; any warning of it is an error."""
    shutil.copy(CONFIG, out / CONFIG.name)
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(out / CONFIG.name)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = COLOUR.sub("", done.stdout + done.stderr).partition("Traceback")[0].rstrip()
        sys.exit(
            f"{said}\nmake docs: the site is not whole, what is missing is above. Lines are those of files in {out / 'source'}"
        )


def _gather_file(path: Path, source: Path) -> None:
    if (ROOT / path).is_dir():
        _write(source / path / "README.md", _listing(path))
        for file in sorted((ROOT / path).iterdir()):
            if file.is_file():
                shutil.copy(file, source / path / file.name)
    elif _is_source(path):
        _write(source / path.with_name(f"{path.name}.md"), _source_page(path))
    else:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)


def _is_source(path: Path) -> bool:
    return path.suffix in LANGUAGES or path.name == "Makefile"


def _source_page(path: Path) -> str:
    """A file to read; search leaves it out, because the API reference has its words already."""
    text = (ROOT / path).read_text(encoding="utf-8").rstrip("\n")
    language = LANGUAGES.get(path.suffix, "makefile")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path.name}\n\n`{path.as_posix()}`\n\n`````{language}\n{text}\n`````\n"


def _listing(path: Path) -> str:
    files = [file for file in sorted((ROOT / path).iterdir()) if file.is_file()]
    lines = [f"- [{file.name}]({file.name}) ({file.stat().st_size / 1000:.0f} kB)" for file in files]
    return f"# {path.as_posix()}/\n\n" + "\n".join(lines) + "\n"


def _write_example(out: Path) -> None:
    """The page that this version of the package makes of the recorded demo."""
    from iwopd.report import write_report

    with unpacked() as demo:
        write_report([demo], out)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
