"""The site: every page is in a table of contents, the references are complete, and it builds without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from gpurt_pages import reference

import dask_gpurt
from dask_gpurt.config_schema import leaves

from .blocks import ROOT

if TYPE_CHECKING:
    from pathlib import Path

DOCS = ROOT / "docs"


def _listed() -> set[str]:
    """The pages that the tables of contents name, from docs/."""
    out = {"index"}
    for page in DOCS.rglob("index.md"):
        for toctree in re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            names = [line for line in toctree.splitlines() if line and not line.startswith(":")]
            out |= {str((page.parent / name).relative_to(DOCS)) for name in names}
    return out


def test_every_page_is_in_a_table_of_contents() -> None:
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")}
    assert _listed() == pages


def test_the_reference_has_every_setting_with_all_its_names() -> None:
    text = {expert: reference(expert) for expert in (False, True)}
    for key, node in leaves().items():
        expert = bool(node.get("x-expert"))
        assert f"### `gpurt.{key}`\n\n{node['description']}" in text[expert]
        assert f"### `gpurt.{key}`\n" not in text[not expert]
    assert "`DASK_GPURT__TIERS__HOST_LIMIT`; argument: `--gpurt-tiers-host-limit`" in text[False]
    assert "- default: `0.6`\n- allowed: a number, above 0, at most 1\n" in text[False]
    assert "- default: `null`\n- allowed: text or a list or `null`\n" in text[False]
    assert "- allowed: `stop`, `stock`\n" in text[False]


def test_the_page_of_the_api_has_every_public_name() -> None:
    page = (DOCS / "reference" / "api.md").read_text()
    documented = set(re.findall(r"auto(?:function|class):: (\w+)$", page, re.MULTILINE))
    assert documented == set(dask_gpurt.__all__) - {"__version__"}


def test_python_versions_are_those_of_the_package() -> None:
    found = set(re.findall(r"Python :: (3\.\d+)", (ROOT / "setup.cfg").read_text()))
    row = re.search(r"^\| Python \| (.*) \|$", (DOCS / "versions.md").read_text(), re.MULTILINE)
    assert row is not None
    assert set(row[1].split(", ")) == found


@pytest.mark.slow
def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    for name in ("sphinx", "myst_parser", "pydata_sphinx_theme", "sphinx_click"):
        pytest.importorskip(name, reason="bash ci/docs.sh builds the site in an environment of its own")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "-b", "html", str(DOCS), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    settings = (tmp_path / "reference" / "settings.html").read_text()
    assert all(f"gpurt.{key}" in settings for key in leaves())
    assert "local_cluster" in (tmp_path / "reference" / "api.html").read_text()
    assert "--policy" in (tmp_path / "reference" / "cli.html").read_text()
