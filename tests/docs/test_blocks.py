"""Every block of docs/deploy/ and the tutorial parses, names what exists, and says how it was exercised."""

from __future__ import annotations

import ast
import configparser
import importlib
import re
import subprocess
from typing import TYPE_CHECKING

import pytest
import yaml

from dask_gpurt.config_schema import leaves

from .blocks import PAGES, ROOT, Block, load, of_page

if TYPE_CHECKING:
    from pathlib import Path

BLOCKS = [block for page in PAGES for block in of_page(page)]
#: how a page may begin to say what was done with a block
WORDS = (
    "Run by ",
    "Rendered",
    "Validated ",
    "Checked ",
    "Loaded ",
    "Parsed ",
    "Not tried",
    "The scheduler's line is run",
)

_each = pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)


def _names(text: str) -> list[str]:
    """Dotted names of this package in a text."""
    return re.findall(r"\bdask_gpurt(?:\.\w+)+", text)


def _parse(block: Block) -> None:
    if block.language == "python":
        ast.parse(block.text)
    elif block.language == "yaml":
        assert all(yaml.safe_load_all(block.text))
    elif block.language == "ini":
        parser = configparser.ConfigParser(strict=False, interpolation=None)
        parser.read_string(block.text)
        assert parser.sections()
    else:
        assert block.language == "sh", f"no check for {block.language}"
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)


def test_they_are_found_and_named_once() -> None:
    assert len(BLOCKS) > 30
    assert len(load()) == len(BLOCKS)
    for page in PAGES:
        fences = re.findall(r"^```(?:sh|python|yaml|ini)$", page.read_text(), re.MULTILINE)
        assert len(fences) == len(of_page(page)), f"{page.name} has a fence without a name, or without what was done"


@_each
def test_it_parses(block: Block) -> None:
    _parse(block)


@_each
def test_what_it_names_of_this_package_exists(block: Block) -> None:
    for name in _names(block.text):
        module, _, attribute = name.rpartition(".")
        if name == "dask_gpurt.preload":
            importlib.import_module(name)
        else:
            assert hasattr(importlib.import_module(module), attribute), name
    for variable in re.findall(r"\bDASK_GPURT__\w+", block.text):
        key = variable.removeprefix("DASK_GPURT__").lower().replace("__", ".").replace("_", "-")
        assert key in leaves(), variable
    for argument in re.findall(r"--gpurt-([\w-]+)", block.text):
        assert argument in {key.replace(".", "-") for key in leaves()}, argument


@_each
def test_its_page_says_how_it_was_exercised(block: Block) -> None:
    assert block.said.startswith(WORDS), block.said
    for test in block.tests:
        path = ROOT / test
        assert path.exists(), test
        assert path.name == "test_blocks.py" or f'"{block.name}"' in path.read_text(), f"{test} has no {block.name}"
    assert block.tests or block.said.startswith("Not tried"), block.said


def test_a_block_that_is_wrong_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- block: odd -->\n```python\nx = (\n```\n\n*Run by `tests/docs/nowhere.py`.*\n")
    (block,) = of_page(page)
    assert (block.name, block.text, block.tests) == ("odd", "x = (\n", ["tests/docs/nowhere.py"])
    with pytest.raises(SyntaxError):
        _parse(block)
    with pytest.raises(AssertionError):
        test_its_page_says_how_it_was_exercised(block)
