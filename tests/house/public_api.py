"""The public interface as text, one line each: ``python -m tests.house.public_api > tests/house/public_api.txt``.

Names of `dask_gpurt` with their signatures, commands with their options, the settings that are not for experts with
their defaults, and what a placement policy sees. docs/versions.md says what is promised about them. Figures are not
here: docs/metrics.md is a list of them already.
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING

import click

import dask_gpurt
from dask_gpurt.cli import gpurt
from dask_gpurt.config import DEFAULTS
from dask_gpurt.config_schema import flat, leaves
from dask_gpurt.model.link import Link
from dask_gpurt.model.views import TaskView, WorkerView
from dask_gpurt.placement.decide.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def lines() -> list[str]:
    """The interface, without what changes from release to release by itself."""
    return [*_python(), *_commands("dask gpurt", gpurt), *_settings(), *_policy()]


def _python() -> Iterator[str]:
    for name in sorted(dask_gpurt.__all__):
        if name.startswith("__"):
            continue
        yield f"dask_gpurt.{name}{_signature(getattr(dask_gpurt, name))}"


def _signature(function: Callable[..., object]) -> str:
    return str(inspect.signature(function)).replace("'", "")  # annotations are text, which Python 3.14 does not quote


def _commands(path: str, command: click.Command) -> Iterator[str]:
    options, arguments = [], []
    for p in command.params:
        if isinstance(p, click.Option):
            options.append("/".join([*p.opts, *p.secondary_opts]) + (" (required)" if p.required else ""))
        else:
            arguments.append(str(p.name).upper() if p.required else f"[{str(p.name).upper()}]")
    yield " ".join([path, *arguments, *sorted(options)])
    if isinstance(command, click.Group):
        for name, below in sorted(command.commands.items()):
            yield from _commands(f"{path} {name}", below)


def _settings() -> Iterator[str]:
    defaults = flat(DEFAULTS["gpurt"])
    for key, node in sorted(leaves().items()):
        if not node.get("x-expert"):
            yield f"gpurt.{key} = {defaults[key]!r}"


def _policy() -> Iterator[str]:
    yield f"Policy.decide{_signature(Policy.decide)}"
    for view in (TaskView, WorkerView):
        yield f"{view.__name__}: {', '.join(view._fields)}"
    yield f"Link: {', '.join(inspect.signature(Link).parameters)}"


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()) + "\n")
