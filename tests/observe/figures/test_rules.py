"""Alert rules and the Grafana dashboard name metrics, labels and label values that exist; panels do not overlap."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from dask_gpurt.observe.collect.causes import BUSY, CAUSES, LOCAL, UNASSIGNED
from dask_gpurt.observe.figures.figure import exported, full_name
from dask_gpurt.observe.figures.table import OWN, SCHEDULER, WORKER

if TYPE_CHECKING:
    from collections.abc import Iterator

PLUGINS = Path(__file__).parents[3] / "plugins"
EVERY = {full_name(figure): figure for figure in (*exported(WORKER), *exported(SCHEDULER), OWN)}
#: words of the query language that these files use
WORDS = {"sum", "rate", "increase", "by", "or", "label_values"}
#: labels whose values are known, and these
VALUES = {
    "cause": set(CAUSES),
    "use": {BUSY, UNASSIGNED, *LOCAL},
    "tier": {"host", "disk"},
    "outcome": {"local", "moved"},
    "way": {"sent", "received", "kept"},
}
#: labels that every sample has
COMMON = {"address", "instance"}


def rules() -> list[dict[str, object]]:
    (group,) = yaml.safe_load((PLUGINS / "prometheus/alerts.yml").read_text())["groups"]
    return list(group["rules"])


def dashboard() -> dict[str, object]:
    return dict(json.loads((PLUGINS / "grafana/dashboard.json").read_text()))


def _queries() -> Iterator[tuple[str, str]]:
    """(where, expression)"""
    for rule in rules():
        yield str(rule["alert"]), str(rule["expr"])
    for panel in dashboard()["panels"]:  # type: ignore[attr-defined]
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in dashboard()["templating"]["list"]:  # type: ignore[index]
        if variable["type"] == "query":
            yield variable["name"], variable["query"]


def problems(expression: str) -> list[str]:
    """What an expression names that is not there."""
    out = []
    rest = re.sub(r"\[[^\]]*\]", "", expression)  # durations
    for name, selector in re.findall(r"(dask_gpurt_\w+)(?:\{([^}]*)\})?", rest):
        figure = EVERY.get(name)
        if figure is None:
            out.append(f"no metric {name}")
            continue
        for label, value in re.findall(r'(\w+)=~?"([^"]*)"', selector):
            if label not in COMMON | {name for name, _ in figure.labels}:
                out.append(f"{name} has no label {label}")
            elif label in VALUES and not set(value.split("|")) <= VALUES[label]:
                out.append(f"label {label} is never {value}")
    rest = re.sub(r"dask_gpurt_\w+(\{[^}]*\})?", "", rest)
    for labels in re.findall(r"by \(([^)]*)\)", rest):
        known = COMMON | {label for figure in EVERY.values() for label, _ in figure.labels}
        out += [f"no label {label.strip()}" for label in labels.split(",") if label.strip() not in known]
    rest = re.sub(r"by \([^)]*\)", "", rest)
    out += [f"unknown word {word}" for word in re.findall(r"[a-z_]+", rest) if word not in WORDS | COMMON]
    if rest.count("(") != rest.count(")"):
        out.append("brackets")
    return out


@pytest.mark.parametrize(("where", "expression"), list(_queries()))
def test_every_name_exists(where: str, expression: str) -> None:
    assert "dask_gpurt_" in expression, where
    assert problems(expression) == []


@pytest.mark.parametrize(
    "expression",
    [
        "rate(dask_gpurt_no_such_total[5m])",
        'dask_gpurt_stall_seconds_total{cause="weather"}',
        'dask_gpurt_tier_bytes{cause="skew"}',
        "sum by (colour) (dask_gpurt_tier_bytes)",
        "ratte(dask_gpurt_tier_bytes)",
        "sum(dask_gpurt_tier_bytes",
    ],
)
def test_what_does_not_exist_is_found(expression: str) -> None:
    assert problems(expression)


def test_counters_are_asked_for_growth() -> None:
    for where, expression in _queries():
        for name in re.findall(r"dask_gpurt_\w+_total", expression):
            if "label_values" not in expression:
                assert re.search(rf"(rate|increase)\({name}", expression), f"{where}: {name}"


def test_rules_say_what_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules()) >= 8
    for rule in rules():
        assert rule["labels"]["severity"] in ("info", "warning", "critical")  # type: ignore[index]
        assert set(rule["annotations"]) == {"summary", "remedy"}  # type: ignore[call-overload]


def test_panels_do_not_overlap() -> None:
    seen: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:  # type: ignore[attr-defined]
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & seen, panel["title"]
        assert at["x"] + at["w"] <= 24
        seen |= cells
