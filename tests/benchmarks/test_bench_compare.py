"""Two result files: only what is beyond the noise of both is worse."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from dask_gpurt.bench.compare import changes, load
from dask_gpurt.cli import gpurt

if TYPE_CHECKING:
    from pathlib import Path

Cells = dict[str, list[float]]


def result(queries: dict[str, Cells], **more: Any) -> dict[str, Any]:
    return {
        "scale": 1.0,
        "fused": False,
        "cold": False,
        "queries": {
            q: {e: {"seconds": s, "errors": [], "differences": []} for e, s in cells.items()}
            for q, cells in queries.items()
        },
        **more,
    }


def invoke(tmp_path: Path, a: dict[str, Any], b: dict[str, Any]) -> tuple[int, str]:
    paths = []
    for name, content in (("a", a), ("b", b)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(content))
        paths.append(str(path))
    done = CliRunner().invoke(gpurt, ["bench", "compare", *paths])
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([1.0, 1.01, 1.02], [1.2, 1.21, 1.22], "WORSE"),
        ([1.2, 1.21, 1.22], [1.0, 1.01, 1.02], "better"),
        # 10 % slower, but each run varies by 10 % by itself
        ([1.0, 1.05, 1.1], [1.1, 1.155, 1.2], "same"),
        # quiet as can be, but 2 % are not worth a failure
        ([1.0, 1.0, 1.0], [1.02, 1.02, 1.02], "same"),
    ],
)
def test_beyond_the_noise(tmp_path: Path, before: list[float], after: list[float], verdict: str) -> None:
    code, text = invoke(tmp_path, result({"q01": {"gpurt": before}}), result({"q01": {"gpurt": after}}))
    assert text.splitlines()[0].endswith(verdict)
    assert code == (1 if verdict == "WORSE" else 0)


def test_a_slower_machine_is_not_a_slower_engine(tmp_path: Path) -> None:
    """Three times the seconds on both engines: the ratio in each round is what it was."""
    a = result({"q01": {"stock": [2.0, 2.2, 2.1], "gpurt": [1.0, 1.1, 1.05]}})
    b = result({"q01": {"stock": [6.0, 6.6, 6.3], "gpurt": [3.0, 3.3, 3.15]}})
    code, text = invoke(tmp_path, a, b)
    assert code == 0
    assert "0.500 -> 0.500 of stock" in text
    assert "stock: " not in text  # the baseline itself is not judged


def test_a_query_that_fails_only_afterwards_is_worse(tmp_path: Path) -> None:
    a = result({"q01": {"gpurt": [1.0] * 3}, "q02": {"gpurt": [1.0] * 3}})
    b = result({"q01": {"gpurt": [1.0] * 3}, "q02": {"gpurt": []}})
    b["queries"]["q02"]["gpurt"]["errors"] = ["KeyError: x"]
    code, text = invoke(tmp_path, a, b)
    assert code == 1
    assert "q02 gpurt: WORSE, it failed: KeyError: x" in text
    code, text = invoke(tmp_path, b, a)
    assert code == 0
    assert "q02" not in text


def test_what_does_not_compare_is_refused(tmp_path: Path) -> None:
    a = result({"q01": {"gpurt": [1.0] * 3}})
    with pytest.raises(ValueError, match=r"scale is 1\.0 in the first and 10\.0"):
        changes(a, result({"q01": {"gpurt": [1.0] * 3}}, scale=10.0))
    with pytest.raises(ValueError, match="no query and engine are in both: q01 on gpurt, and q02 on gpurt"):
        changes(a, result({"q02": {"gpurt": [1.0] * 3}}))
    with pytest.raises(ValueError, match=r"has 1 run\(s\) in a file, must be at least 3.*Remedy: bench tpch --runs 3"):
        changes(a, result({"q01": {"gpurt": [1.0]}}))
    (tmp_path / "x").write_text("no json")
    with pytest.raises(ValueError, match="is not JSON"):
        load(str(tmp_path / "x"))
    (tmp_path / "x").write_text("{}")
    with pytest.raises(ValueError, match="has no queries"):
        load(str(tmp_path / "x"))
    code, text = invoke(tmp_path, a, {})
    assert code == 1
    assert "has no queries. Remedy" in text


@pytest.mark.parametrize("cells", [5, {"gpurt": 5}, {"gpurt": {"seconds": [1.0]}}])
def test_a_file_of_something_else_is_one_line(tmp_path: Path, cells: Any) -> None:
    good = result({"q01": {"gpurt": [1.0, 1.0, 1.0]}})
    code, text = invoke(tmp_path, good, {**good, "queries": {"q01": cells}})
    assert code == 1
    assert "b.json has no differences, errors, seconds of q01. Remedy: give what bench tpch --json wrote" in text


def test_an_engine_that_some_query_lacks_is_left_out(tmp_path: Path) -> None:
    runs = [1.0, 1.0, 1.0]
    both = result({"q01": {"stock": runs, "gpurt": runs}, "q02": {"stock": runs, "gpurt": runs}})
    one = result({"q01": {"stock": runs, "gpurt": runs}, "q02": {"stock": runs}})
    code, text = invoke(tmp_path, both, one)
    assert code == 0
    assert "gpurt" not in text
    # Nor is it what the others are compared with.
    less = result({"q01": {"stock": runs, "gpurt": runs, "stock-inf": runs}, "q02": {"gpurt": runs, "stock-inf": runs}})
    code, text = invoke(tmp_path, less, less)
    assert code == 0
    assert "q02 stock-inf: 1.000 -> 1.000 s" in text
