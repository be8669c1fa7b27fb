"""The schema of the ``gpurt`` namespace: which keys there are, what each allows, and values as texts.

An unknown key or a value that is not allowed is an error that names the value, what is allowed and the nearest match: a
typo must not run a cluster on defaults.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import dask.config
import yaml

from dask_gpurt.errors import ConfigError

try:  # every process that starts reads these files: 3 ms instead of 40
    from yaml import CSafeLoader as Loader
except ImportError:
    from yaml import SafeLoader as Loader  # type: ignore[assignment]

_HERE = os.path.dirname(__file__)


def load(name: str) -> dict[str, Any]:
    """One of the package's YAML files."""
    with open(os.path.join(_HERE, name), encoding="utf-8") as f:
        loaded: dict[str, Any] = yaml.load(f, Loader=Loader)
    return loaded


@functools.cache
def schema() -> dict[str, Any]:
    """The JSON schema of the ``gpurt`` namespace."""
    return load("gpurt-schema.yaml")


@functools.cache
def leaves() -> dict[str, dict[str, Any]]:
    """Dotted key (without ``gpurt.``) to its schema, in the order of the file."""
    out: dict[str, dict[str, Any]] = {}

    def walk(node: dict[str, Any], prefix: str) -> None:
        for key, sub in node["properties"].items():
            if sub.get("type") == "object":
                walk(sub, f"{prefix}{key}.")
            else:
                out[prefix + key] = sub

    walk(schema()["properties"]["gpurt"], "")
    return out


def flat(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key without ``gpurt.`` to value; nested mappings are taken apart, except a mapping that is a value."""
    known = leaves()
    out: dict[str, Any] = {}

    def walk(tree: Mapping[str, Any], prefix: str) -> None:
        for key, value in tree.items():
            dotted = (prefix + str(key).replace("_", "-")).removeprefix("gpurt.")
            if isinstance(value, Mapping) and dotted not in known:
                walk(value, f"{dotted}." if dotted != "gpurt" else "")
            else:
                out[dotted] = value

    walk(overrides, "")
    return out


def read(key: str, text: str) -> Any:
    """The value that a text means for a setting, as Dask reads environment variables: lists, mappings, numbers, none.

    A text that means something of a type that the setting cannot have stays a text: a folder may be named ``123``.
    """
    value = dask.config.interpret_value(text)
    return value if isinstance(value, _allowed(leaves()[key])) else text


def write(key: str, value: object) -> str:
    """The text from which `read` makes `value` again."""
    text = str(value)
    return text if key not in leaves() or read(key, text) == value else repr(value)


def canonical(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings under their names with ``-``. Mappings that are values stay as they are: their keys are no names."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        name = str(key).replace("_", "-")
        is_section = isinstance(value, Mapping) and prefix + name not in leaves()
        out[name] = canonical(value, f"{prefix}{name}.") if is_section else value
    return out


_TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list, tuple),
}


def _types(node: dict[str, Any]) -> list[str]:
    return node["type"] if isinstance(node["type"], list) else [node["type"]]


def _allowed(node: dict[str, Any]) -> tuple[type, ...]:
    return tuple(t for name in _types(node) for t in _TYPES[name])


def check(value: Any, node: dict[str, Any], where: str) -> None:
    """Check a value against its part of the schema.

    It knows what our schema uses of JSON schema; a test holds the two against each other with jsonschema.

    Raises
    ------
    ConfigError
        An unknown key or a value that is not allowed. It begins with `where`, the dotted name of the setting.
    """
    if node.get("type") == "object":
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is {value!r}, must be a mapping with the keys {', '.join(node['properties'])}")
        for key in value:
            if key not in node["properties"]:
                known = list(node["properties"])
                near = difflib.get_close_matches(key, known, 1, 0.5)
                # A value given one level too high or too low is the other common slip.
                elsewhere = [d for d in leaves() if d.rsplit(".", 1)[-1] == key]
                hint = near or elsewhere
                raise ConfigError(
                    f"unknown key {where}.{key} = {value[key]!r}. Allowed here: {', '.join(known)}."
                    + (f" Did you mean {where + '.' + near[0] if near else 'gpurt.' + elsewhere[0]}?" if hint else "")
                )
        for key in node["required"]:
            if key not in value:
                raise ConfigError(f"{where}.{key} is missing. Remedy: leave it at its default, see gpurt.yaml")
        for key, sub in value.items():
            check(sub, node["properties"][key], f"{where}.{key}")
        return
    if not isinstance(value, _allowed(node)) or (isinstance(value, bool) and "boolean" not in _types(node)):
        raise ConfigError(f"{where} is {value!r} ({type(value).__name__}), must be {_said(node)}")
    if "enum" in node and value not in node["enum"]:
        near = difflib.get_close_matches(str(value), [e for e in node["enum"] if isinstance(e, str)], 1, 0.4)
        raise ConfigError(
            f"{where} is {value!r}, must be {_said(node)}." + (f" Did you mean {near[0]!r}?" if near else "")
        )
    if isinstance(value, (list, tuple)):
        if len(value) < node.get("minItems", 0):
            raise ConfigError(f"{where} is {value!r}, must be {_said(node)}")
        for i, item in enumerate(value):
            check(item, node["items"], f"{where}[{i}]")
    if "pattern" in node and isinstance(value, str) and not re.search(node["pattern"], value):
        near = difflib.get_close_matches(value, [e for e in node["examples"] if isinstance(e, str)], 1, 0.4)
        raise ConfigError(
            f"{where} is {value!r}, must be {_said(node)}." + (f" Did you mean {near[0]!r}?" if near else "")
        )
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high = node.get("minimum"), node.get("maximum")
        above = node.get("exclusiveMinimum")
        if (
            not -math.inf < value < math.inf  # NaN would pass the comparisons below
            or (low is not None and value < low)
            or (high is not None and value > high)
            or (above is not None and value <= above)
        ):
            raise ConfigError(f"{where} is {value!r}, must be {_said(node)}")


def _said(node: dict[str, Any]) -> str:
    """What a leaf allows, in words."""
    if "enum" in node:
        return "one of " + ", ".join(repr(v) for v in node["enum"])
    if "pattern" in node:
        return "one like " + ", ".join(repr(v) for v in node["examples"])
    names = {
        "boolean": "true or false",
        "integer": "an integer",
        "null": "null",
        "object": "a mapping",
        "array": "a list of strings",
    }
    text = " or ".join(names.get(t, f"a {t}") for t in _types(node))
    bounds = [
        f"{word} {node[key]}"
        for key, word in (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="))
        if key in node
    ]
    return text + (" " + " and ".join(bounds) if bounds else "")
