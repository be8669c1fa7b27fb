"""The graph of imports of a package, read from its source."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def module_name(package: Path, path: Path) -> str:
    """The dotted name of a file of a package."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, wherever in it: modules, and names of modules."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield from (f"{node.module}.{a.name}" for a in node.names)


def graph(package: Path) -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports. A name that is no module stands for the module it is in."""
    files = {module_name(package, path): path for path in sorted(package.rglob("*.py"))}
    out: dict[str, set[str]] = {}
    for module, path in files.items():
        names = set(imported(path))
        found = {name if name in files else name.rpartition(".")[0] for name in names}
        out[module] = {name for name in found if name in files} - {module}
    return out


def circles(edges: dict[str, set[str]]) -> set[frozenset[str]]:
    """The strongly connected parts of more than one module."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            for module in edges[left.pop()] - seen:
                seen.add(module)
                left.append(module)
        return seen

    below = {module: reached(module) for module in edges}
    return {frozenset(b for b in below[a] if a in below[b]) for a in edges if a in below[a]}
