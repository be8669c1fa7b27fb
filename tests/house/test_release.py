"""What a release consists of beside the wheel: the conda recipe and the Dockerfiles agree with setup.cfg."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import dask_gpurt

jinja2 = pytest.importorskip("jinja2")

ROOT = Path(__file__).parents[2]
#: name of a package for pip -> for conda
CONDA = {"msgpack": "msgpack-python", "xxhash": "python-xxhash", "dask[dataframe]": "dask"}


def _setup() -> configparser.ConfigParser:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup


def _recipe() -> dict[str, Any]:
    source = (ROOT / "recipe" / "meta.yaml").read_text()
    rendered: dict[str, Any] = yaml.safe_load(
        jinja2.Template(source, undefined=jinja2.StrictUndefined).render(PYTHON="python")
    )
    return rendered


def _requirement(line: str) -> str:
    """A line of setup.cfg as a recipe writes it."""
    match = re.fullmatch(r"([\w.\[\]-]+)(.*)", line.strip())
    assert match is not None
    return f"{CONDA.get(match[1], match[1])} {match[2]}"


def test_the_version_stands_in_one_place_and_the_recipe_has_it() -> None:
    assert _setup()["metadata"]["version"] == "attr: dask_gpurt._version.__version__"
    assert str(_recipe()["package"]["version"]) == dask_gpurt.__version__


def test_the_recipe_needs_what_the_package_needs() -> None:
    options = _setup()["options"]
    needed = {_requirement(line) for line in options["install_requires"].split("\n") if line}
    assert set(_recipe()["requirements"]["run"]) == {*needed, f"python {options['python_requires']}", "__linux"}


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cu13"])
def test_dockerfiles_install_extras_that_exist_from_files_that_exist(name: str) -> None:
    text = (ROOT / "deploy" / name).read_text()
    (extras,) = re.findall(r'pip install --no-cache-dir "\$\{SOURCE\}\[([\w,]+)\]"', text)
    assert set(extras.split(",")) <= set(_setup()["options.extras_require"])
    for sources in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
    (image,) = re.findall(r"^FROM python:(3\.\d+)-slim$", text, re.MULTILINE)
    assert f"Python :: {image}" in _setup()["metadata"]["classifiers"]
