"""The gate of ci/replay.sh: recorded runs of stock Dask, replayed.

The traces were made by ``python -m benchmarks.replay`` on two cores: `tree` and `stencil` of tasks that sleep, `spill`
of arrays of three times the memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from dask_gpurt.cli import gpurt
from dask_gpurt.observe.trace.reader import Trace
from dask_gpurt.simulate.replay import replay

TRACES = sorted((Path(__file__).parent / "traces").glob("*.trace"))


def test_there_are_traces() -> None:
    assert [path.stem for path in TRACES] == ["spill", "stencil", "tree"]


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.stem)
def test_the_prediction_is_near_and_the_extension_not_slower(path: Path) -> None:
    trace = Trace.load(path)
    stock, ours = replay(trace, "stock"), replay(trace, "gpurt")
    assert stock.same
    assert abs(stock.error) < 0.15
    assert ours.makespan_seconds <= 1.02 * stock.makespan_seconds
    for made in (stock, ours):
        assert min(made.network_share, made.disk_share) >= 0
        assert made.network_share + made.disk_share <= made.idle_share + 1e-6
        assert (made.disk_share > 0.1) == (path.stem == "spill")
    # The same in every process: chance has a seed.
    assert replay(trace, "stock").makespan_seconds == stock.makespan_seconds


def test_spilling_in_the_background_writes_less_than_stock() -> None:
    """A value that was read keeps its copy, and what is needed last goes first."""
    trace = Trace.load(next(path for path in TRACES if path.stem == "spill"))
    stock, ours = replay(trace, "stock").result, replay(trace, "gpurt").result
    assert ours.spilled_bytes < stock.spilled_bytes / 2
    assert ours.read_bytes < stock.read_bytes / 2


def test_the_gate_closes() -> None:
    given = ["replay", str(TRACES[0]), "--policy", "stock,random", "--gate", "0.01"]
    done = CliRunner().invoke(gpurt, given)
    assert done.exit_code == 1
    assert "more than 0.01 times" in done.output
