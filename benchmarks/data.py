"""Where results lie, and what every result carries (`dask_gpurt.bench.facts`, under the names that benchmarks use)."""

from __future__ import annotations

import json
import os
from typing import Any

from dask_gpurt.bench.facts import commit, cores, facts, versions, write_json

__all__ = ["OUT", "RESULTS", "ROOT", "commit", "cores", "earlier", "facts", "put", "versions", "write_json"]

#: root of the checkout
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
#: where results that belong to the repository lie
RESULTS = os.path.join(ROOT, "benchmarks", "results")
#: where everything else goes; not tracked
OUT = os.path.join(ROOT, "out")


def earlier(path: str | None) -> dict[str, Any]:
    """What an earlier run wrote to `path`, for those that add to it; empty when there is none."""
    if not path or not os.path.exists(path):
        return {}
    with open(path) as f:
        found: dict[str, Any] = json.load(f)
    return found


def put(path: str, report: dict[str, Any]) -> None:
    """Write a result, or print it where `path` is ``-``."""
    print(json.dumps(report, indent=1) if path == "-" else write_json(path, report))
