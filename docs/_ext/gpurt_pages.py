"""Directives of the site: `gpurt-settings`, the reference of all settings from the schema and the defaults.

`reference` makes the text, so that a test can look at it without Sphinx.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

from dask_gpurt.config import DEFAULTS
from dask_gpurt.config_schema import leaves

if TYPE_CHECKING:
    from collections.abc import Callable


def reference(expert: bool) -> str:
    """Settings as a Markdown list of definitions, in the order of the schema.

    Parameters
    ----------
    expert
        Those marked ``x-expert`` in the schema, or the others.
    """
    return "\n".join(_entry(key, node) for key, node in leaves().items() if bool(node.get("x-expert")) is expert)


def _entry(key: str, node: dict[str, Any]) -> str:
    env = "DASK_GPURT__" + key.replace(".", "__").replace("-", "_").upper()
    argument = "--gpurt-" + key.replace(".", "-")
    return (
        f"### `gpurt.{key}`\n\n{node['description']}\n\n"
        f"- default: `{_text(_default(key))}`\n- allowed: {_allowed(node)}\n"
        f"- environment: `{env}`; argument: `{argument}`\n"
    )


def _default(key: str) -> Any:
    value: Any = DEFAULTS["gpurt"]
    for part in key.split("."):
        value = value[part]
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


#: the schema's word -> ours
_TYPES = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "`true` or `false`",
    "array": "a list",
    "object": "a mapping",
    "null": "`null`",
}


def _allowed(node: dict[str, Any]) -> str:
    if "enum" in node:
        return ", ".join(f"`{_text(value)}`" for value in node["enum"])
    kinds = node["type"] if isinstance(node["type"], list) else [node["type"]]
    text = " or ".join(_TYPES[kind] for kind in kinds)
    bounds = [
        f"{words} {node[name]}"
        for name, words in (("minimum", "at least"), ("exclusiveMinimum", "above"), ("maximum", "at most"))
        if name in node
    ]
    if "pattern" in node:
        text += " such as " + ", ".join(f"`{example}`" for example in node["examples"])
    return ", ".join([text, *bounds])


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    # Late: the tests use `reference` where Sphinx is not installed.
    from docutils.parsers.rst import directives
    from sphinx.util.docutils import SphinxDirective

    class Settings(SphinxDirective):
        """``{gpurt-settings} public`` or ``{gpurt-settings} expert``."""

        required_arguments = 1
        option_spec: ClassVar[dict[str, Callable[[str], Any]]] = {}

        def run(self) -> list[Any]:
            kind = directives.choice(self.arguments[0], ("public", "expert"))
            nodes: list[Any] = self.parse_text_to_nodes(reference(kind == "expert"), allow_section_headings=True)
            return nodes

    app.add_directive("gpurt-settings", Settings)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
