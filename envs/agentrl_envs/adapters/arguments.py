"""Arguments of calls, held against the JSON schemas of servers."""

from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import referencing

from agentrl.env.tools import ToolCallError


def check_arguments(name: str, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Refuse arguments that do not fit a schema.

    Patterns are left to the server, which checks what it is sent: a search may take for ever (`^(a+)+$`), and meanwhile no
    other thread runs.

    Raises:
        ToolCallError: in words that tell the model what is wrong.
    """
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator = jsonschema.validators.extend(kind, _PATTERNS | {"additionalProperties": _additional(kind)})
    # A registry of our own: by default a `$ref` to a URL would be downloaded.
    problems = validator(_of_one_dialect(schema), registry=referencing.Registry()).iter_errors(arguments)
    if (problem := jsonschema.exceptions.best_match(problems)) is not None:
        place = ".".join(map(str, problem.absolute_path))
        raise ToolCallError(f"wrong arguments for {name}: {f'{place}: ' if place else ''}{problem.message}")


def _of_one_dialect(schema: Any) -> Any:
    """Return a schema whose parts name no dialect: each that does would be checked by that one, patterns included."""
    if isinstance(schema, Mapping):
        of_parts = {key: _of_one_dialect(part) for key, part in schema.items()}
        return {key: part for key, part in of_parts.items() if key != "$schema" or not isinstance(part, str)}
    return list(map(_of_one_dialect, schema)) if isinstance(schema, list) else schema


def _unchecked(*_: Any) -> Iterator[jsonschema.ValidationError]:
    yield from ()


_PATTERNS = dict.fromkeys(("pattern", "patternProperties", "unevaluatedProperties"), _unchecked)
"""Keywords that search for patterns."""


def _additional(kind: Any) -> Any:
    """Return the check of what `properties` does not name, which searches where there are patterns of names."""

    def check(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
        if "patternProperties" not in schema:
            yield from kind.VALIDATORS["additionalProperties"](validator, allowed, instance, schema)

    return check
