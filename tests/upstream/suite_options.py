"""pytest plugin for the suites in dask's wheel: the wheel lacks the top-level ``conftest.py`` that knows
``--runslow``."""

from __future__ import annotations

from typing import Any

import pytest


def pytest_addoption(parser: Any) -> None:
    """``--runslow``: do not skip tests marked ``slow``."""
    parser.addoption("--runslow", action="store_true", help="run tests marked slow")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Skips what needs the internet always, and what is slow unless asked for."""
    for item in items:
        if "network" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs the internet"))
        if "slow" in item.keywords and not config.getoption("--runslow"):
            item.add_marker(pytest.mark.skip(reason="need --runslow option to run"))
