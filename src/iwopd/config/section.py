"""What every part of the tree of settings shares."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import InitErrorDetails

from iwopd.errors import UserError


class ConfigError(UserError, ValueError):
    """A setting that is wrong, said in words for the person who wrote it."""


Beta = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["float32", "bfloat16", "float16"]


class Section(BaseModel):
    """A part of the tree."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def validate_part(section: type[Section], values: Any, name: str) -> Section:
    """A section that another section holds under `name` without a field for it; errors name it as if there were one."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        faults = [_below(name, fault) for fault in error.errors()]
        raise ValidationError.from_exception_data(section.__name__, faults) from None


def _below(name: str, fault: Any) -> InitErrorDetails:
    return InitErrorDetails(type=fault["type"], loc=(name, *fault["loc"]), input=fault["input"], ctx=fault.get("ctx", {}))
