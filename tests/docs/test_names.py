"""What all documents say a user can type exists: commands with their options, settings, Python names."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import click
import pytest

import dask_gpurt
from dask_gpurt.bench.tpch.cli import parser as tpch_parser
from dask_gpurt.cli import gpurt
from dask_gpurt.config_schema import leaves

from .blocks import ROOT

if TYPE_CHECKING:
    from pathlib import Path

DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])

_FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def commands(text: str) -> list[str]:
    """What follows ``dask gpurt`` in fences and code spans."""
    lines = [line for fence in _FENCE.findall(text) for line in fence.splitlines()] + _SPAN.findall(text)
    found = [re.search(r"\bdask gpurt ([a-z].*)", line.split("  #")[0]) for line in lines]
    return [match[1] for match in found if match is not None]


def wrong_commands(text: str) -> list[str]:
    """Commands that do not exist, or have options that do not exist."""
    out = []
    for command in commands(text):
        name, *arguments = shlex.split(command, comments=True)
        found = gpurt.commands.get(name)
        while isinstance(found, click.Group) and arguments and arguments[0] in found.commands:
            found = found.commands[arguments.pop(0)]
        if found is None:
            out.append(command)
            continue
        known = {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)}
        if found is gpurt.commands["bench"].commands["tpch"]:  # hands its options on
            known |= set(tpch_parser("")._option_string_actions)
        known |= set(click.Context(gpurt, **gpurt.context_settings).help_option_names)
        out += [command for a in arguments if re.match(r"-(?!\d)", a) and a.split("=")[0] not in known]
    return out


def wrong_settings(text: str) -> list[str]:
    """Settings that do not exist; the beginning of a key, such as ``gpurt.tiers``, does."""
    known = {".".join(key.split(".")[:n]) for key in leaves() for n in (1, 2, 3)}
    named = re.findall(r"`gpurt\.([a-z-]+(?:\.[a-z-]+)*)", text)
    named += [
        a.replace("-", ".", 1) for a in re.findall(r"--gpurt-((?:placement|tiers|shuffle|observe|trace)-[a-z-]+)", text)
    ]
    return [name for name in named if name not in known]


def wrong_functions(text: str) -> list[str]:
    """Public functions that do not exist."""
    return [name for name in re.findall(r"\bdask_gpurt\.(\w+)\(", text) if name not in dask_gpurt.__all__]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_says_to_type_exists(document: Path) -> None:
    text = document.read_text()
    # The page shows what becomes of a typing error.
    text = text.replace("--gpurt-tiers-host-limt", "") if document.name == "troubleshooting.md" else text
    assert wrong_commands(text) == []
    assert wrong_settings(text) == []
    assert wrong_functions(text) == []


def test_what_does_not_exist_is_found() -> None:
    text = "`dask gpurt where X --fast`, `dask gpurt start`, `dask gpurt status x --timeout 5`"
    text += "\n```\ndask gpurt halt # x\n```\n"
    assert wrong_commands(text) == ["halt # x", "where X --fast", "start"]
    assert wrong_settings("`gpurt.tiers`, `gpurt.tiers.host-limt: 1`, --gpurt-shuffle-codex 1") == [
        "tiers.host-limt",
        "shuffle.codex",
    ]
    assert wrong_functions("dask_gpurt.stats(client), dask_gpurt.status(client)") == ["stats"]
