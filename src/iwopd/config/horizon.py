"""The `[rollout.horizon]` section: `type` chooses a registered horizon, whose settings are the rest."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pydantic import ConfigDict, Field, ValidationError, model_validator

from iwopd.config.wording import in_words, shown
from iwopd.registry import suggestion
from iwopd.rollout.horizons import HORIZONS, Horizon
from iwopd.section import Section


class HorizonSettings(Section):
    """How far answers are written in training. Further settings are those of the type: `iwopd methods` lists them."""

    model_config = ConfigDict(extra="allow", frozen=True, validate_default=True, ignored_types=(cached_property,))

    type: str = Field("full", description="full, fixed, growing, drift, budget or a plug-in's; settings: `iwopd methods`")

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        """Check the settings by the type that was chosen, and fill in the defaults."""
        if not isinstance(values, Mapping):
            return values
        given = {name: value for name, value in values.items() if name != "type"}
        name = values.get("type", "full")
        return {"type": name, **_made(name, given).model_dump(by_alias=True)}

    @cached_property
    def made(self) -> Horizon:
        """The horizon with these settings."""
        return _made(self.type, dict(self.model_extra or {}))


def _made(name: Any, given: dict[str, Any]) -> Horizon:
    if not isinstance(name, str):
        raise ValueError(f"type must be one of {', '.join(HORIZONS)}, got {name!r}")
    try:
        chosen = HORIZONS[name]
    except (ImportError, TypeError) as error:
        raise ValueError(str(error)) from None
    known = [info.alias or field for field, info in chosen.model_fields.items()]
    for setting in given:
        if setting not in known:
            raise ValueError(f"horizon {name!r} has no setting {setting!r}{suggestion(setting, known) if known else ''}")
    try:
        return chosen.model_validate(given)
    except ValidationError as error:
        raise ValueError("; ".join(_fault(fault) for fault in error.errors())) from None


def _fault(fault: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    message = in_words(fault)
    given = f" (given: {shown(fault['input'])})" if where and fault["type"] != "missing" else ""
    return f"{where}: {message}{given}" if where else message
