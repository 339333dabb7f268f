"""The page while a run goes on: written again whenever a log grows; the page loads itself again.

There is no server: the file is replaced in one go, and the browser that has it open reads it again from the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from iwopd.analysis.probe.result import PROBE_FILE
from iwopd.report.page import MAX_TOKENS, check_out, write_report
from iwopd.report.reading import NothingToReportError, read_all, split_paths
from iwopd.runs.directory import LOGS
from iwopd.runs.logs import Notes
from iwopd.runs.reading import Run

FILES = ("run.json", "config.toml", *LOGS, PROBE_FILE)
Stamps = dict[Path, tuple[int, int]]


def watch(
    runs: Sequence[Path],
    out: Path,
    *,
    probes: Sequence[Path] = (),
    every: float = 5.0,
    handoff: Path | None = None,
    max_tokens: int = MAX_TOKENS,
    say: Callable[[str], None] = print,
    ready: Callable[[Path], None] | None = None,
) -> Path:
    """Keep `out` up to date until all runs have done their steps; Ctrl-C ends it, too, with a page that stays as it is.

    `ready` is called once, when there is a page.
    """
    check_out(out)
    seen: Stamps | None = None
    written = False

    def write(refresh: float | None) -> bool:
        with suppress(NothingToReportError):
            write_report(runs, out, probes=probes, handoff=handoff, max_tokens=max_tokens, refresh=refresh)
            return True
        return False

    try:
        while True:
            now = stamps([*runs, *probes])
            if now != seen:
                first = not written
                written = write(every) or written
                if first:
                    going = f"report: {out} (written again every {every:g} s as the run goes on)"
                    say(going if written else "waiting for a run")
                    if written and ready is not None:
                        ready(out)
            elif written and all_finished(runs, probes):  # and nothing was added since the last look: the last evaluation is in
                write(None)
                say(f"the run is finished; report: {out}")
                return out
            seen = now
            time.sleep(every)
    except KeyboardInterrupt:
        if out.exists():  # rather than `written`, which may not be set yet
            write(None)
        raise


def stamps(runs: Sequence[Path]) -> Stamps:
    """Time and size of every file that a report reads."""
    folders = [folder for run in runs for folder in (run, *(sorted(run.iterdir()) if run.is_dir() else ())) if folder.is_dir()]
    files = [run for run in runs if run.is_file()] + [folder / name for folder in folders for name in FILES]
    found: Stamps = {}
    for file in files:
        with suppress(OSError):
            about = file.stat()
            found[file] = (about.st_mtime_ns, about.st_size)
    return found


def all_finished(runs: Sequence[Path], probes: Sequence[Path] = ()) -> bool:
    """Probes are finished once they are there; runs that cannot be read yet are not."""
    found, _ = read_all(runs, probes, Notes())
    return (bool(found) or not split_paths(runs)[0]) and all(_finished(run) for run in found)


def _finished(run: Run) -> bool:
    """All steps are recorded, and every task was evaluated after the last one."""
    return run.finished and {one.task for one in run.evals} == {one.task for one in run.evals if one.step == run.step}
