"""What every section of settings shares, those of plug-ins included: its base class, marks, and types of values."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

_KEYS = re.compile(
    r"(?:(?:hf|sk|pk|gsk|r8|gh[opsur]|github_pat|glpat|xox[abpr]|nvapi|pplx|tgp|fw|dckr_pat|pypi)[_-]|AKIA|AIza|eyJ)"
    r"(?:(?=[\w-]*[0-9A-Z])[\w-]{8,}|[a-z]{8,}$)"
)
"""How keys of well-known services begin."""
_RANDOM = re.compile(r"[0-9a-fA-F]{32,}|(?=.*[0-9])(?=.*[a-z])(?=.*[A-Z])[0-9a-zA-Z]{20,}")
"""What nobody would call a variable."""


def looks_like_a_key(text: str) -> bool:
    return bool(_KEYS.match(text) or _RANDOM.fullmatch(text))


def check_variable(name: str) -> str:
    """The name of an environment variable that holds a secret; the secret itself is refused, and not repeated."""
    if not name.isidentifier() or not name.isascii() or looks_like_a_key(name):
        raise ValueError("must be the name of an environment variable, not the key itself")
    return name


def _server_url(url: str) -> str:
    """Scheme, host and port (and a path if a proxy needs one), without the `/v1` that some write."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise ValueError("a server's URL looks like http://host:8000")
    pieces = re.split(r"[/=&;?]", unquote(f"{parts.path}/{parts.query}/{parts.fragment}"))
    if parts.username or parts.password or any(map(looks_like_a_key, pieces)):
        raise ValueError("a URL must not hold a password: put the key into an environment variable and name it: api_key_env")
    if parts.query or parts.fragment:
        raise ValueError(
            "a server's URL has no query: it looks like http://host:8000, and a key goes into an environment variable that "
            "api_key_env names"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


Variable = Annotated[str, AfterValidator(check_variable)]
Url = Annotated[str, AfterValidator(_server_url)]
Urls = Annotated[list[str], AfterValidator(lambda urls: [_server_url(url) for url in urls])]
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

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @classmethod
    def plugged_in(cls) -> dict[str, type[Section]]:
        """Sections that other packages add to this one, by name."""
        return {}


def has_mark(info: FieldInfo, *marks: str) -> bool:
    """Whether a field has one of these marks."""
    extra = info.json_schema_extra
    return isinstance(extra, dict) and any(extra.get(mark) for mark in marks)


def validate_part(section: type[Section], values: Any, name: str) -> Section:
    """A section that another section holds under `name` without a field for it; errors name it as if there were one."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        faults: list[Any] = [{**fault, "loc": (name, *fault["loc"])} for fault in error.errors()]
        raise ValidationError.from_exception_data(section.__name__, faults) from None


def outcome_settings(section: Section) -> dict[str, Any]:
    """Settings that are not the defaults and not marked as `Place`."""
    places = {name for name, info in type(section).model_fields.items() if has_mark(info, "place")}
    return section.model_dump(mode="json", exclude_defaults=True, exclude=places)
