"""Chat templates of one's own: Jinja text from a file, and the names that a template knows."""

from __future__ import annotations

from pathlib import Path

from iwopd.errors import UserError

SPECIAL = (*(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")), "additional_special_tokens")
GIVEN = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", *SPECIAL),
)
"""What every template is given: by transformers, and by the tokenizer."""


class TemplateError(UserError, ValueError):
    """A chat template that cannot be read, with the reason."""


def read_template(given: str) -> str:
    """The text of the file that is named, or `given` itself where it is Jinja text already, as in the settings of a run."""
    text, where = given, "the chat template"
    if "{{" not in given and "{%" not in given:
        where = f"the chat template {given}"
        try:
            text = Path(given).expanduser().read_text(encoding="utf-8")
        except FileNotFoundError:
            raise TemplateError(f"there is no file {given}: name a file with a Jinja template") from None
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
            raise TemplateError(f"cannot read {where}: {why}") from None
        if "{{" not in text and "{%" not in text:
            raise TemplateError(f"{where} is no Jinja template: it has neither {{{{ ... }}}} nor {{% ... %}}")
    try:
        known_names(text)
    except TemplateError as error:
        raise TemplateError(f"{where} {error}") from None
    return text


def known_names(template: str) -> frozenset[str]:
    """The names that a template asks for, beside those that every template is given: `enable_thinking`, ..."""
    from jinja2 import Environment, TemplateSyntaxError, meta, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        """transformers' tag around what the assistant says."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        parsed = Environment(autoescape=False, extensions=["jinja2.ext.loopcontrols", Generation]).parse(template)
    except TemplateSyntaxError as error:
        raise TemplateError(f"is no Jinja template: line {error.lineno}: {error.message}") from None
    return frozenset(meta.find_undeclared_variables(parsed)) - GIVEN
