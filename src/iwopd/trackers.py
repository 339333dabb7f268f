"""Trackers: where the numbers of a run go besides its JSONL files. `tracking.trackers` names them.

Another package adds one with an entry point in the group `iwopd.trackers`. It names a class (or a function) that takes the
run directory, the project and all settings by dotted name, and gives an object with `log` and `close`:

    class Printer:
        def __init__(self, folder: Path, project: str, settings: Mapping[str, Any]) -> None: ...
        def log(self, step: int, values: Mapping[str, float]) -> None: ...
        def close(self) -> None: ...

One that takes words has a method `alert(step, title, text)`: something begins to go wrong (`runs.alerts`). As long as it
holds, the number `alert/<kind>` is 1.

One that can take back what it was told has a method `rewind(step)`, called before the first `log` of a resumed run: the process
before it may have been killed, and every step after `step` will come again.

A tracker's own package is imported when a run starts, not when its settings are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from iwopd.errors import ConfigError
from iwopd.registry import Registry


class TrackerBackend(Protocol):
    """What receives the numbers."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a training step, or the accuracy of its evaluation as `eval/<task>`; called several times per step."""

    def close(self) -> None:
        """The run is over, or was interrupted."""


OpenTracker = Callable[[Path, str, Mapping[str, Any]], TrackerBackend]


def _adopt(name: str, loaded: Any, where: str) -> OpenTracker:
    if not callable(loaded):
        raise TypeError(f"must be a class or function (folder, project, settings) -> tracker, got {loaded!r}")
    return cast(OpenTracker, loaded)


TRACKERS: Registry[OpenTracker] = Registry("tracker", "iwopd.trackers", _adopt)


def open_tracker(name: str, folder: Path, project: str, settings: Mapping[str, Any], after: int | None) -> TrackerBackend:
    """`after`: of a resumed run, the step that it goes on after (-1: it begins again); None: the run is new."""
    try:
        opener = TRACKERS[name]
        folder.mkdir(parents=True, exist_ok=True)
        tracker = opener(folder, project, settings)
    except (ImportError, TypeError, KeyError) as error:
        raise ConfigError(f"the tracker {name!r} cannot be opened: {error}") from error
    if after is not None and callable(rewind := getattr(tracker, "rewind", None)):
        rewind(after)
    return tracker


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers whose package is missing, before anything is loaded or made."""
    for name in names:
        try:
            module = getattr(TRACKERS[name], "module", None)
        except (ImportError, TypeError, KeyError) as error:
            raise ConfigError(f"the tracker {name!r} cannot be opened: {error}") from error
        if isinstance(module, str):
            _need(module, name)


class TensorBoard:
    """Event files. Each step is in them when the next one begins, so that a killed run can take up where they end."""

    module = "torch.utils.tensorboard"

    def __init__(self, folder: Path, project: str, settings: Mapping[str, Any]) -> None:
        self._open = partial(_need(self.module, "tensorboard").SummaryWriter, str(folder / "tensorboard"))
        self._first: int | None = None

    @cached_property
    def writer(self) -> Any:
        return self._open(purge_step=self._first)

    def rewind(self, step: int) -> None:
        """Readers drop what an earlier file says of later steps."""
        self._first = step + 1

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def alert(self, step: int, title: str, text: str) -> None:
        """In the tab for texts."""
        self.writer.add_text("alerts", f"**{title}**: {text}", step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """Weights & Biases. Its files belong to the run, not to wherever the command was started."""

    module = "wandb"

    def __init__(self, folder: Path, project: str, settings: Mapping[str, Any]) -> None:
        self._open("wandb", folder, project, settings, dir=str(folder))

    def _open(self, package: str, folder: Path, project: str, settings: Mapping[str, Any], **place: str) -> None:
        self.library = _need(package, package)
        self.library.init(project=project, name=folder.name, config=dict(settings), **place)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.library.log(dict(values), step=step)

    def alert(self, step: int, title: str, text: str) -> None:
        """As the library's own alerts, which it may send on; an old one may not know them."""
        if callable(send := getattr(self.library, "alert", None)):
            send(title=title, text=f"step {step}: {text}")

    def close(self) -> None:
        self.library.finish()


class Trackio(Wandb):
    """trackio offers the same three calls, and keeps one database for all runs, in `TRACKIO_DIR`."""

    module = "trackio"

    def __init__(self, folder: Path, project: str, settings: Mapping[str, Any]) -> None:
        self._open("trackio", folder, project, settings)


TRACKERS.add("tensorboard", TensorBoard)
TRACKERS.add("trackio", Trackio)
TRACKERS.add("wandb", Wandb)


def _need(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"the tracker {extra!r} is not installed ({error}): pip install 'iwopd[{extra}]'") from None
