"""Rendering of a stranger's chat template within limits of time and size."""

import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache, wraps
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from agentrl.errors import TemplateLimitError

MAX_SECONDS = 5.0
"""Processor time in which a template renders a dialogue; an honest one needs milliseconds."""
MAX_CHARS = 2**25
"""Size of any value that a template makes, in characters; a context of a million tokens has fewer."""
_MAX_MADE = 2**30
"""Characters that a template makes while it renders a dialogue, all values together."""
_MAX_SOURCE, _MAX_BITS = 2**18, 2**14
"""Size of a template in characters, and of a whole number."""
_NODE = 64
"""Characters that an entry of a list or a mapping counts for."""
_BY_TEXT = frozenset({"replace", "join", "wordwrap", "translate", "urlize", "xmlattr"})
_BY_NUMBER = frozenset(
    {"batch", "center", "expandtabs", "indent", "ljust", "pprint", "rjust", "slice", "to_bytes", "tojson", "zfill"}
)
"""Filters and methods whose result grows with the product of their operands."""
_WIDTHS = re.compile(r"%(?:\([^)]*\))?[^a-zA-Z%]*(?:\*|\d{5})|\{[^{}:]*+:[^{}]*?(?:\d{5}|\{)")
"""Widths in a format that are large, or are given by an operand."""


def render_limited(template: str, **values: Any) -> str:
    """Return the text that a chat template makes of its variables, as transformers renders it, within limits.

    Every loop, call, operator, filter and output of the template counts its time and the size of what it makes; operations
    whose result grows with a product are measured before they run.

    Raises:
        TemplateLimitError: if it takes too much time or memory; the message says which.
        Exception: whatever else the template raises.
    """
    if len(template) > _MAX_SOURCE:
        raise TemplateLimitError(f"has more than {_MAX_SOURCE:,} characters")
    _used.deadline = time.thread_time() + MAX_SECONDS
    _used.made = 0
    _note_sizes(values)
    try:
        return str(_measured(_compiled(template).render(documents=None, **values)))
    finally:
        _used.known = {}


class _Used(threading.local):
    """Use of the limits in a thread."""

    def __init__(self) -> None:
        self.deadline = math.inf
        """End of the processor time that the thread may use."""
        self.made = self.rounds = 0
        self.known: dict[int, int] = {}
        """Sizes of the lists and mappings that the template was given, by identity."""


_used = _Used()


def _tick(num_chars: int) -> None:
    """Count time, and characters that were made."""
    _used.made += num_chars
    _used.rounds += 1
    if (
        _used.rounds % 32 == 0 and time.thread_time() > _used.deadline
    ):  # reading the clock takes longer than most rounds
        raise TemplateLimitError(f"takes more than {MAX_SECONDS:g} s to render a dialogue: it may have no end")
    if _used.made > _MAX_MADE:
        raise TemplateLimitError(f"makes more than {_MAX_MADE:,} characters to render a dialogue: it may have no end")


def _note_sizes(value: Any) -> int:
    if not isinstance(value, dict | list):
        return _size(value)
    members = (*value, *value.values()) if isinstance(value, dict) else value
    _used.known[id(value)] = size = _NODE + sum(map(_note_sizes, members))
    return size


def _size(value: Any) -> int:
    """Return the size of a value in characters; beyond the limit, some size beyond it."""
    size, left = 0, [value]
    while left and size <= MAX_CHARS:
        item = left.pop()
        if isinstance(item, str | bytes):
            size += len(item)
        elif isinstance(item, dict | list | tuple):
            known = _used.known.get(id(item))
            size += _NODE * (1 + len(item)) if known is None else known
            if known is None:
                left += (*item, *item.values()) if isinstance(item, dict) else item
    return size


def _check(is_small: bool) -> None:
    if not is_small:
        raise TemplateLimitError(f"makes a value of more than {MAX_CHARS:,} characters")


def _measured(value: Any) -> Any:
    """Return a value that is small enough."""
    if isinstance(value, str | bytes | dict | list | tuple):
        size = len(value) if isinstance(value, str) else _size(value)
        _check(size <= MAX_CHARS)
        _tick(size)
    return value


def _counted(items: Iterable[Any], num_chars: int) -> Iterator[Any]:
    for item in items:
        _tick(num_chars)
        yield item


def _check_operands(name: str, operands: Sequence[Any]) -> None:
    """Refuse a call of a filter or a method whose result would be too large."""
    if name in ("format", "format_map"):
        _check(not _WIDTHS.search(str(operands[0])))
    elif name in _BY_TEXT:
        first, *others = map(_size, operands)
        _check(first * (1 + max(others[name == "replace" :], default=0)) <= MAX_CHARS)  # what is replaced adds nothing
    elif name in _BY_NUMBER:
        numbers = [abs(operand) for operand in operands if isinstance(operand, int)]
        _check((1 + _size(operands[0])) * max(numbers, default=0) <= MAX_CHARS)


class _LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The environment in which transformers renders chat templates, with limits."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        tags = [_Generation, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=tags, finalize=_measured)
        self.filters["tojson"] = _tojson
        self.filters = {name: _limited(name, function) for name, function in self.filters.items()}
        self.filters |= {"counted": _counted, "measured": _measured}
        self.globals = {name: self.globals[name] for name in ("range", "dict", "cycler", "joiner", "namespace")}
        self.globals["raise_exception"] = _raise_exception

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls."""
        receiver = getattr(getattr(called, "__wrapped__", called), "__self__", None)
        if isinstance(receiver, str | bytes | int | list | tuple | dict):
            _check_operands(called.__name__, [receiver, *args, *kwargs.values()])
        return _measured(super().call(context, called, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operation whose result may be large."""
        if isinstance(left, int) and isinstance(right, int):
            factor = max(right, 1) if operator == "**" else 1
            _check(left.bit_length() * factor + right.bit_length() <= _MAX_BITS)
        elif operator == "*":
            number, value = (left, right) if isinstance(left, int) else (right, left)
            _check(not isinstance(number, int) or _size(value) * number <= MAX_CHARS)
        elif operator == "%":
            _check(not (isinstance(left, str) and _WIDTHS.search(left)))
        return _measured(super().call_binop(context, operator, left, right))

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Counting().visit(source), *args, **kwargs)


class _Generation(Extension):
    """The tag around what the assistant says, which marks it for transformers."""

    tags = {"generation"}  # noqa: RUF012 - jinja's field

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Counting(NodeTransformer):
    """Adds a count to each loop of a template, and a measure to what it puts together."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja's name
        """Count each round, with the template's own text in it."""
        self.generic_visit(node)
        num_chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.iter = nodes.Filter(node.iter, "counted", [nodes.Const(num_chars)], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Expr) -> nodes.Node:  # noqa: N802
        """Measure what is put together."""
        self.generic_visit(node)
        return nodes.Filter(node, "measured", [], [], None, None, lineno=node.lineno)

    def visit_Dict(self, node: nodes.Expr) -> nodes.Node:  # noqa: N802
        """Measure it unless it is made of constants."""
        is_constant = all(isinstance(part, nodes.Const | nodes.Pair) for part in node.find_all(nodes.Expr))
        return node if is_constant or getattr(node, "ctx", "load") != "load" else self.visit_Concat(node)

    visit_List = visit_Tuple = visit_Dict


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter whose operands and result are measured."""

    @wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        _check_operands(name, [a for a in given if not isinstance(a, Context | nodes.EvalContext | Environment)])
        return _measured(function(*args, **kwargs))

    return limited


def _tojson(
    data: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON as transformers' templates write it: nothing is escaped for HTML."""
    return json.dumps(data, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def parse_template(template: str) -> nodes.Template:
    """Return the syntax tree of a chat template."""
    return _environment().parse(template)


@lru_cache(maxsize=64)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


_environment = cache(_LimitedEnvironment)
