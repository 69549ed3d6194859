"""A stock chat template, rendered as transformers renders it, whose conditions can be looked at one by one.

Invariant: rendering is a pure function of messages and tools (no clock, no file, nothing that a template could
change). It knows nothing of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateRefuses(ValueError):
    """The template raised on a conversation, or isn't a template."""


@dataclass(frozen=True)
class Condition:
    """What an ``if`` of a template asks, or a part of it joined by ``and`` or ``or``."""

    line: int
    text: str
    """The source line in which it stands."""


class ChatTemplate:
    def __init__(self, source: str, variables: Mapping[str, Any], forced: tuple[int, bool] | None = None) -> None:
        """``variables``: what the template may use beside messages and tools (``bos_token``).

        ``forced``: (index of a condition, value that it is to have). Raises TemplateRefuses.
        """
        self.source, self._variables = source, dict(variables)
        environment = _environment()
        try:
            parsed = environment.parse(source)
            lines = source.splitlines()
            slots = [(node, "test") for kind in (nodes.If, nodes.CondExpr) for node in parsed.find_all(kind)]
            slots += [(node, side) for node in parsed.find_all((nodes.And, nodes.Or)) for side in ("left", "right")]
            self.conditions = tuple(Condition(node.lineno, lines[node.lineno - 1].strip()) for node, _ in slots)
            if forced is not None:
                node, slot = slots[forced[0]]
                setattr(node, slot, nodes.Const(forced[1], lineno=node.lineno))
            self._template = environment.from_string(parsed)
        except TemplateError as error:
            raise TemplateRefuses(f"line {getattr(error, 'lineno', '?')}: {error}") from error

    def forcing(self, condition: int, value: bool) -> ChatTemplate:
        """The same template with one condition decided beforehand."""
        return ChatTemplate(self.source, self._variables, (condition, value))

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *, prompted: bool = False
    ) -> str:
        """``prompted``: with the generation prompt at the end. Raises TemplateRefuses in the template's own words."""
        try:
            return self._template.render(
                messages=list(messages), tools=list(tools) or None, add_generation_prompt=prompted, **self._variables
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise TemplateRefuses(str(error) or type(error).__name__) from error


class _Generation(Extension):
    """``{% generation %}`` marks what assistants say; it changes nothing of the text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise TemplateError(message)
