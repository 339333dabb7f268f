"""The `[method]` section: a tagged union over the registered objectives.

`objective` says which settings there are: those of the objective and of the advantage that it uses. A setting that they do not
use is refused. Plug-ins bring their own, so the section is checked against the registries (`algo.objectives`) and not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from iwopd.config.wording import in_words, shown
from iwopd.section import Section

if TYPE_CHECKING:
    from iwopd.algo.objectives import Objective


class Method(Section):
    """What is trained. Further settings are those of the objective: `iwopd methods` lists them."""

    model_config = ConfigDict(extra="allow", frozen=True, validate_default=True, ignored_types=(cached_property,))

    objective: str = Field("policy-gradient", description="what is minimised; its own settings: `iwopd methods`")
    weights: str = Field("uniform", description="weight rule: see `iwopd methods`")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of the weight rule, e.g. {gamma = 0.5}")

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        """Check every setting by the type that the objective gives it, and fill in the defaults."""
        if not isinstance(values, Mapping):
            return values
        from iwopd.algo.objectives import make_objective, objective_class

        given = {name: value for name, value in values.items() if name != "objective"}
        try:
            chosen = objective_class(values)
            known = chosen.settings(given)
            typed = {name: _typed(name, value, known[name].type) if name in known else value for name, value in given.items()}
            make_objective({"objective": chosen.name, **typed})
        except (TypeError, ImportError) as error:
            raise ValueError(str(error)) from None
        return {"objective": chosen.name, **{name: one.default for name, one in known.items()}, **typed}

    @cached_property
    def made(self) -> Objective:
        """The objective with these settings."""
        from iwopd.algo.objectives import make_objective

        return make_objective(self.model_dump())


def _typed(name: str, value: Any, wanted: Any) -> Any:
    try:
        return TypeAdapter(wanted).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{name}: {in_words(error.errors()[0])} (given: {shown(value)})") from None
