"""A client's preload, on real processes: a program without a changed line."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.cluster.processes import processes
from tests.versions import needs_pandas_3

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cluster

PROGRAM = """
import sys
import dask.dataframe as dd
import pandas as pd
from distributed import Client

def write(factor):
    for i in range(4):
        pd.DataFrame({"key": [1, 2, 3], "value": [factor * i, factor, 1]}).to_parquet(f"data/part.{i}.parquet")

def answer():
    t = dd.read_parquet("data")
    joined = t.merge(t[t.value > 0], on="key", suffixes=("", "_r"))
    out = joined.groupby("key").agg({"value": "sum"}).compute()
    return sorted(out.value.to_dict().items())

with Client(sys.argv[1]):
    for factor in (1, 5):
        write(factor)
        print(answer())
        print(answer())
held = sys.modules.get("dask_gpurt.planning.held")
print("not loaded" if held is None else (held.HELD.installed, held.HELD.failed, held.HELD.hits > 20))
"""


@pytest.mark.parametrize(
    ("preload", "last"),
    [("[]", "not loaded"), pytest.param("dask_gpurt.preload", "(True, None, True)", marks=needs_pandas_3)],
    ids=["stock", "preload"],
)
def test_the_same_answers(tmp_path: Path, preload: str, last: str) -> None:
    (tmp_path / "data").mkdir()
    with processes(tmp_path) as p:
        address = p.scheduler("--preload", "dask_gpurt.preload")
        p.worker(address, "--no-nanny")
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, address],
            env={**p.env, "DASK_DISTRIBUTED__CLIENT__PRELOAD": preload},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    one, again, other, other_again, figures = done.stdout.splitlines()
    # Three of the four files have rows with key 1 and a positive value; each joins with all four.
    assert one == again == "[(1, 18), (2, 16), (3, 16)]"
    assert other == other_again == "[(1, 90), (2, 80), (3, 16)]"
    assert figures == last
