"""Which of a request's chat_template_kwargs may reach a chat template. Pure.

The one rule: a request sets only variables that the model's own template names. `apply_chat_template` also takes
arguments that replace the template, pad a prompt to any length or pass options to the tokenizer. So names are allowed
by the template, not forbidden by a list.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from clawstream.errors import UnrenderableRequest
from clawstream.rendering.history import UNPRINTABLE

THINKING = "enable_thinking"
_FIELD = "chat_template_kwargs"
_FUNCTIONS = frozenset({"raise_exception", "strftime_now"})  # transformers' own
_MAX_OPTIONS = 16
_MAX_CHARACTERS = 4096
_MAX_NUMBER = 2**20


class _Generation(Extension):
    """Transformers' block that marks an assistant's text; it renders as its body."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the statements up to the block's end."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_variables(
    template: str | Mapping[str, str] | None, special_tokens: Iterable[str], apply: Callable[..., Any]
) -> frozenset[str]:
    """Return the names that a request may set: those that the template looks up and its renderer does not provide.

    `apply` renders the template; its arguments and the tokenizer's special tokens are not for a client to set. A
    template that can't be read has no variables.
    """
    environment = ImmutableSandboxedEnvironment(extensions=[_Generation, "jinja2.ext.loopcontrols"])
    texts = template.values() if isinstance(template, Mapping) else [] if template is None else [template]
    found: set[str] = set()
    for text in texts:
        try:
            found |= find_undeclared_variables(environment.parse(text))
        except TemplateError:
            continue
    return frozenset(
        found - _FUNCTIONS - {"messages"} - set(special_tokens) - inspect.signature(apply).parameters.keys()
    )


def template_options(asked: object, variables: frozenset[str] | None) -> Mapping[str, Any]:
    """Return the part of `asked` that reaches the template; `variables` are its names, None: the family checks names.

    A switch for thinking is dropped for a template without one, since clients send it to every model. Raises
    UnrenderableRequest for any other name, and for values that are not plain or too large.
    """
    if asked is None:
        return {}
    if not isinstance(asked, Mapping):
        raise UnrenderableRequest(f"{_FIELD} is not an object; send one, or leave it out")
    if not isinstance(asked.get(THINKING, True), bool):
        raise UnrenderableRequest(f"{_FIELD}.{THINKING} is not a boolean; send true or false")
    if len(asked) > _MAX_OPTIONS:
        raise UnrenderableRequest(f"{_FIELD} has {len(asked)} names; expected at most {_MAX_OPTIONS}")
    unknown = sorted(asked.keys() - variables - {THINKING}) if variables is not None else []
    if unknown and variables is not None:
        names = ", ".join(sorted(variables)) or "none"
        raise UnrenderableRequest(
            f"{_FIELD}.{unknown[0][:50]} is no variable of the model's own template, which has: {names}"
        )
    for name, value in asked.items():
        problem = _problem(value)
        if problem is not None:
            raise UnrenderableRequest(f"{_FIELD}.{name[:50]} is {problem}")
    return {name: value for name, value in asked.items() if variables is None or name in variables}


def _problem(value: object) -> str | None:
    """Why a template may not get the value; None: it may."""
    match value:
        case None | bool():
            return None
        case int() | float():
            fits = math.isfinite(value) and abs(value) <= _MAX_NUMBER
            return None if fits else f"a number beyond {_MAX_NUMBER}; expected one from -{_MAX_NUMBER} to {_MAX_NUMBER}"
        case str():
            if len(value) > _MAX_CHARACTERS:
                return f"{len(value)} characters long; expected at most {_MAX_CHARACTERS}"
            if value != value.translate(UNPRINTABLE):
                return "text with NUL or half a character (a lone surrogate), which no prompt can contain"
            return None
    return "neither text, a number, true, false nor null"
