"""The words at the end of a run follow its figures."""

from __future__ import annotations

import json

import pytest

from dask_gpurt.bench.tpch import report
from dask_gpurt.bench.tpch.answers import Difference
from dask_gpurt.bench.tpch.meters import Traffic
from dask_gpurt.bench.tpch.runner import Measured, Outcome
from dask_gpurt.bench.tpch.verdict import words

FACTS = {"scale": 1, "exercised_on": "a test", "commit": "?", "when": "?"}


def cell(query: int, engine: str, seconds: list[float], keys: int = 0, spilled: int = 0, kept: int = 0) -> Measured:
    traffic = [Traffic(keys, 0, 0, spilled, 0, kept=kept)] * len(seconds)
    return Measured(query, engine, seconds=seconds, traffic=traffic)


def outcome(*cells: Measured) -> Outcome:
    numbers = sorted({c.query for c in cells})
    return Outcome(["stock", "gpurt"], numbers, {(c.query, c.engine): c for c in cells})


def test_gain_its_origin_and_the_losses() -> None:
    text = "\n".join(
        words(
            outcome(
                cell(1, "stock", [1.0, 1.0, 1.0]),
                cell(1, "gpurt", [1.5, 1.5, 1.5], keys=200_000_000),
                cell(9, "stock", [9.0, 9.0, 9.0], spilled=300_000_000),
                cell(9, "gpurt", [3.5, 3.5, 3.5]),
            )
        )
    )
    assert "gpurt: 2 queries in 5.00 s, stock in 10.00 s: 2.00 times as fast." in text
    assert "Most of it came from q09 5.50 s (300 MB less written to disk): 100% of all seconds saved." in text
    slower = "q01 is slower (1.50 times, the median of the rounds): 1.50 s against 1.00 s, "
    assert f"{slower}200 MB more received from other workers." in text


def test_first_and_later_runs_and_what_was_kept_between_them() -> None:
    pair = cell(1, "stock", [4.0, 4.0, 4.0]), cell(1, "gpurt", [4.0, 1.0, 2.0], kept=300_000_000)
    text = "\n".join(words(outcome(*pair)))
    assert "First runs of each: 4.00 s against 4.00 s (1.00 times); later ones: 1.50 s against 4.00 s (2.67" in text
    assert "q01 2.00 s (300 MB of files' columns found decoded)" in text
    assert "First runs" not in "\n".join(words(outcome(cell(1, "stock", [4.0]), cell(1, "gpurt", [1.0]))))


@pytest.mark.parametrize(
    ("stock", "gpurt", "why"),
    [
        ([1.0, 1.3, 1.6], [1.1, 1.4, 1.7], "within the noise of the runs"),
        ([1.0, 1.0, 1.0], [1.4, 1.4, 1.4], "no count of bytes explains it; the report has the state"),
        ([1.0], [1.4], "no count of bytes explains it; of one run, which may be noise"),
    ],
)
def test_why_a_query_lost(stock: list[float], gpurt: list[float], why: str) -> None:
    text = words(outcome(cell(4, "stock", stock), cell(4, "gpurt", gpurt)))[-1]
    assert text.startswith("q04 is slower (")
    assert why in text


def test_a_slower_engine_and_failures_are_told() -> None:
    failed = Measured(2, "stock", errors=["KeyError: x"])
    good = outcome(cell(1, "stock", [1.0]), cell(1, "gpurt", [2.0]), failed, cell(2, "gpurt", [1.0]))
    text = "\n".join(words(good))
    assert "q02: a right answer from gpurt only, not from stock; not in the sums." in text
    assert "gpurt: 1 queries in 2.00 s, stock in 1.00 s: 2.00 times as slow." in text
    none = outcome(failed, Measured(2, "gpurt", errors=["KeyError: x"]))
    assert words(none) == ["No query was answered rightly by both gpurt and stock: there is nothing to compare."]
    equal = words(outcome(cell(1, "stock", [1.0]), cell(1, "gpurt", [1.0])))
    assert equal[-1] == "No query is slower than stock by more than 3%."


def test_a_wrong_answer_is_no_gain() -> None:
    wrong = cell(2, "gpurt", [0.1])
    wrong.differences.append(Difference(2, 0, "n_name", "PERU", "CHINA"))
    measured = outcome(cell(1, "stock", [1.0]), cell(1, "gpurt", [1.0]), cell(2, "stock", [9.0]), wrong)
    assert report.totals(measured)["gpurt"]["sum_of_medians_s"] == 1.0
    text = words(measured)
    assert text[0] == "q02: a right answer from stock only, not from gpurt; not in the sums."
    assert text[1] == "gpurt: 1 queries in 1.00 s, stock in 1.00 s: 1.00 times as fast."


def test_first_later_runs_and_price() -> None:
    one = cell(3, "stock", [9.0, 3.0, 1.0, 2.0])
    assert (one.warm(0.5), one.warm(0.95)) == (2.0, 3.0)
    assert cell(3, "stock", [9.0]).warm(0.5) is None
    assert report.price(one, 3600.0) == 2.5
    assert report.price(one, None) is None
    facts = {**FACTS, "price_per_hour": 3600.0}
    found = report.result(outcome(one, cell(3, "gpurt", [1.0] * 4)), facts, [])["queries"]["q03"]["stock"]
    assert (found["first_s"], found["later_p50_s"], found["later_p95_s"], found["price"]) == (9.0, 2.0, 3.0, 2.5)
    page = report.page(outcome(one, cell(3, "gpurt", [1.0] * 4)), facts, [], {}).render()
    assert "seconds of each run of query 3" in page
    assert "megabytes that query 3 moved" in page


def test_a_query_that_was_not_run_is_not_equal() -> None:
    """The file is written after each query, and stays so when the command is interrupted."""
    found = outcome(cell(1, "stock", [1.0]), cell(1, "gpurt", [1.0]), Measured(2, "stock"), Measured(2, "gpurt"))
    assert report.result(found, FACTS, [])["all_equal_to_duckdb"] is False
    assert report.total_rows(found)[0][-1] == "1/2 equal"


def test_with_a_failed_run_nothing_is_called_the_first() -> None:
    """Three runs of which the first failed: the second found plans of the first, and compares with no first run."""
    failed = cell(3, "gpurt", [2.0, 1.0])
    failed.errors.append("KeyError: x")
    measured = outcome(cell(3, "stock", [3.0, 3.0, 3.0]), failed)
    found = report.result(measured, FACTS, [])["queries"]["q03"]["gpurt"]
    assert found["seconds"] == [2.0, 1.0]
    assert [found[name] for name in ("median_s", "first_s", "later_p50_s", "later_p95_s")] == [None] * 4
    page = report.page(measured, FACTS, [], {}).render()
    assert "run 3" in page
    assert "2.00" not in page


def test_the_median_of_two_is_between_them() -> None:
    """Bytes and DuckDB's seconds as well as the engines' seconds beside which they stand."""
    one = cell(4, "stock", [1.0, 3.0])
    one.traffic = [Traffic(keys, 0, 0, 0, 0) for keys in (10, 30)]
    assert one.bytes("network") == 20
    found = outcome(one, cell(4, "gpurt", [1.0, 3.0]))
    found.beside = {"duckdb": {4: [1.0, 3.0]}}
    assert words(found)[-1] == "duckdb, beside it: 2.00 s for 1 queries (one process, no cluster)."


def test_without_any_answer_the_file_is_json_and_no_mean_is_told() -> None:
    failed = outcome(Measured(2, "stock", errors=["KeyError: x"]), Measured(2, "gpurt", errors=["KeyError: x"]))
    json.dumps(report.result(failed, FACTS, []), allow_nan=False)
    assert report.total_rows(failed, joined=True)[0][3] == "–"
    assert "geometric mean" not in report.page(failed, FACTS, [], {}).render()
