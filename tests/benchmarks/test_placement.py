"""benchmarks/placement.py: what its table says of cases made by hand, and that a small run works."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import placement

if TYPE_CHECKING:
    from pathlib import Path


def case(policy: str, makespan: float, *, seed: int = 0, bound: float = 10.0, peak: int = 100, **more: Any) -> Any:
    return {
        "workers": 64,
        "mix": "nodes",
        "shape": "tree",
        "seed": seed,
        "policy": policy,
        "tasks": 5,
        "bound_seconds": bound,
        "bound_by": "work",
        "makespan_seconds": makespan,
        "near_bytes": 0,
        "between_nodes_bytes": 2 * 10**9,
        "between_racks_bytes": 0,
        "peak_worker_bytes": peak,
        "peak_total_bytes": peak,
        "spilled_bytes": 0,
        "scheduler_us_per_task": 1.0,
        **more,
    }


def test_a_tight_bound_is_the_reference() -> None:
    (e,) = placement.table([case("stock", 20), case("inf", 12), case("gpurt", 10.5)])
    assert e["reference"] == "bound"
    assert e["policies"]["gpurt"]["to_reference"] == 1.05
    assert e["policies"]["gpurt"]["worst_to_better_stock"] == pytest.approx(10.5 / 12, abs=1e-3)
    assert placement.misses([e]) == []


def test_of_a_loose_bound_the_best_is() -> None:
    (e,) = placement.table([case("stock", 20), case("inf", 30), case("gpurt", 24, peak=130)])
    assert e["reference"] == "best found (stock)"
    assert e["policies"]["gpurt"]["to_reference"] == 1.2
    assert e["policies"]["gpurt"]["to_bound"] == 2.4
    assert placement.misses([e]) == [
        "x1.20 of the better stock (limit 1.03): 64 workers, nodes, tree",
        "x1.30 of stock's peak memory (limit 1.2): 64 workers, nodes, tree",
        "x1.20 of the reference (limit 1.15): 64 workers, nodes, tree",
    ]


def test_the_worst_seed_counts() -> None:
    rows = [
        case(p, m, seed=s)
        for p, ms in {"stock": (20, 20), "inf": (20, 10), "gpurt": (10, 15)}.items()
        for s, m in enumerate(ms)
    ]
    (e,) = placement.table(rows)
    assert e["seeds"] == 2
    assert e["policies"]["gpurt"]["worst_to_better_stock"] == 1.5
    assert e["policies"]["gpurt"]["worst_to_reference"] == 1.5


def test_a_failed_case_costs_only_itself() -> None:
    failed = placement.run_case(placement.Case(4, "nodes", "tree", 0, "no.module:Class"))
    assert failed["error"].startswith("ConfigError")
    assert placement.table([failed]) == []


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "r.json")
    arguments = ["--workers", "4", "--shapes", "tree", "--mixes", "flat", "--seeds", "0", "--jobs", "1", "--out", out]
    placement.main([*arguments, "--policies", "stock"])
    placement.main([*arguments, "--policies", "gpurt", "--add"])
    with open(out) as f:
        written = json.load(f)
    assert [c["policy"] for c in written["cases"]] == ["gpurt", "stock"]
    assert "tree" in capsys.readouterr().out


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    c = placement.Case(4, "racks", "tree", 0, "gpurt")
    placement.explain(c, "sum", 1)
    said = capsys.readouterr().out
    assert "('sum', 0)" in said
    assert "nothing that stock does not know" in said  # all that it reads is in one zone
    with pytest.raises(SystemExit, match="prefixes: load, sum"):
        placement.explain(c, "nothing")


def test_unknown_shape(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        placement.parse(["--shapes", "tre"])
    assert "'tre' is not one of tree" in capsys.readouterr().err
