"""The table of figures is consistent, and its documentation is up to date."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from dask_gpurt.observe.figures.figure import Figure, exported, full_name
from dask_gpurt.observe.figures.table import OWN, SCHEDULER, WORKER
from tests.observe.fakes import figures
from tests.observe.figures.dictionary import markdown

ROOT = Path(__file__).parents[3]
EVERY = (*exported(WORKER), *exported(SCHEDULER), OWN)


def test_documentation_is_up_to_date() -> None:
    """Remedy: ``python -m tests.observe.figures.dictionary > docs/metrics.md``"""
    got = subprocess.run(
        [sys.executable, "-m", "tests.observe.figures.dictionary"],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    ).stdout
    assert got == markdown()
    assert (ROOT / "docs/metrics.md").read_text() == got


def test_names() -> None:
    for figure in EVERY:
        name = full_name(figure)
        assert re.fullmatch(r"dask_gpurt_[a-z0-9_]+", name)
        assert name.endswith("_total") == (figure.kind == "counter"), name
        if figure.unit in ("bytes", "seconds", "microseconds"):
            assert f"_{figure.unit}" in name, name
    assert full_name(exported(WORKER)[0], "") == "gpurt_slot_wall_seconds_total"
    keys = [figure.heartbeat for figure in WORKER if figure.heartbeat]
    assert len(set(keys)) == len(keys) <= 48
    for table in (WORKER, SCHEDULER):
        paths = [figure.path for figure in table if figure.path]
        assert len(set(paths)) == len(paths)


def test_what_a_worker_exports_rides_on_its_heartbeat() -> None:
    for figure in WORKER:
        assert bool(figure.heartbeat) == (figure.kind is not None) == bool(figure.family)
        assert figure.path or figure.heartbeat


def test_figures_of_one_family_differ_in_labels_only() -> None:
    families: dict[str, Figure] = {}
    seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    for figure in EVERY:
        first = families.setdefault(full_name(figure), figure)
        assert (first.kind, first.unit, first.about) == (figure.kind, figure.unit, figure.about)
        assert [name for name, _ in first.labels] == [name for name, _ in figure.labels]
        assert (figure.family, figure.labels) not in seen
        seen.add((figure.family, figure.labels))
        assert figure.key.count("*") == sum(value == "*" for _, value in figure.labels)


def test_paths_reach_what_they_name() -> None:
    tree = figures(local=3, declined=2, fallbacks=1)
    got = {figure.key: list(figure.samples(tree)) for figure in exported(SCHEDULER)}
    assert got["placement.decisions.local"] == [(("local",), 3)]
    assert got["placement.declined.*"] == [(("no inputs",), 2)]
    assert got["placement.fallbacks.*.*"] == [(("decide", "exception"), 1)]
    assert got["placement.links.*.samples"] == [(("process",), 0), (("host",), 7), (("network",), 0)]
    assert all(got.values())


def test_what_is_not_there_has_no_sample() -> None:
    limit = next(figure for figure in WORKER if figure.key == "disk_limit_bytes")
    for tree in ({}, {"disk_limit_bytes": None}, {"disk_limit_bytes": True}, {"disk_limit_bytes": float("nan")}):
        assert list(limit.samples(tree)) == []
