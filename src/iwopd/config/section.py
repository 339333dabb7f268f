"""What every part of the tree of settings shares."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from iwopd.errors import UserError


class ConfigError(UserError, ValueError):
    """A setting that is wrong, said in words for the person who wrote it."""


Beta = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["float32", "bfloat16", "float16"]

T = TypeVar("T")
Place = Annotated[T, Field(json_schema_extra={"place": True})]
"""Mark of a setting that says only where something is, or how it is asked, kept or shown. It may change when a run is resumed,
and two runs that differ in it alone have the same outcome."""
Repeat = Annotated[T, Field(json_schema_extra={"repeat": True})]
"""Mark of a setting in which repeats of one method may differ: its seed, its length, how it is measured."""


class Section(BaseModel):
    """A part of the tree."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @classmethod
    def plugged_in(cls) -> dict[str, type[Section]]:
        """Sections that other packages add to this one, by name."""
        return {}
