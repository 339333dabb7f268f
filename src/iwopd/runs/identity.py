"""Which method a run is of, and which of its settings make it that method. Reads saved settings of any version."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import tomli_w

from iwopd.config import Config, defaults, flatten, without
from iwopd.methods import resolved


def student_name(models: Mapping[str, Any]) -> str | None:
    """What results call the student of a `[models]` section."""
    if models.get("student"):
        return str(models["student"]).rstrip("/").rpartition("/")[2] or None
    if models.get("world"):
        size, lineage = models.get("student_size"), models.get("lineage", 0)
        return f"{models['world']} world" + (f", {size}" if size else "") + (f", lineage {lineage}" if lineage else "")
    return None


def method_settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The dotted settings that repeats of one method share.

    `tree` is a saved `config.toml`. What another version did not know yet counts with its default.
    """
    section = tree.get("method")
    tree = {**tree, "method": resolved(section)} if isinstance(section, Mapping) else tree
    return {**dict(flatten(without(defaults(), "place", "repeat"))), **dict(flatten(without(tree, "place", "repeat")))}


def run_key(config: Config) -> str:
    """Names a run by every setting that decides its outcome and is not the default, so a setting that is added later changes
    no name; where things are and what is shown does not count either.
    """
    tree = without(config.model_dump(mode="json", exclude_none=True, exclude_defaults=True), "place")
    return hashlib.sha256(tomli_w.dumps(tree).encode()).hexdigest()[:12]
