"""Why did this task run there? Three answers of `dask_gpurt.explain`.

One task stays with its input, one has the smaller of two inputs moved to it, and one has a policy that fails, so that
Dask decides. Two workers, on this machine, for some seconds. `docs/observe.md` shows and explains the output.

    python examples/explain.py
"""

from __future__ import annotations

import time
from typing import Any

from distributed import Client, wait

import dask_gpurt
from dask_gpurt.placement.decide.policy import Cheapest


class Careless(Cheapest):
    """A policy with a fault: it fails for tasks whose inputs are small."""

    def decide(self, task: Any, workers: Any, far: Any) -> int | None:
        if max(w.near_bytes + w.far_bytes for w in workers) < 10_000:
            raise ValueError("so little data was not expected")
        return super().decide(task, workers, far)


def block(nbytes: int) -> bytes:
    return bytes(nbytes)


def size(*blocks: bytes) -> int:
    time.sleep(0.01)
    return sum(map(len, blocks))


def main() -> None:
    with (
        dask_gpurt.local_cluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0", settings={"policy": f"{__name__}:Careless"}
        ) as cluster,
        Client(cluster) as client,
    ):
        left, right = client.scheduler_info()["workers"]
        large = client.submit(block, 20_000_000, workers=[left], key="large")
        other = client.submit(block, 5_000_000, workers=[right], key="other")
        small = client.submit(block, 100, workers=[right], key="small")
        wait([large, other, small])
        local = client.submit(size, large, key="size-local")
        wait(local)
        moved = client.submit(size, large, other, key="size-moved")
        wait(moved)
        fallback = client.submit(size, small, key="size-fallback")
        wait(fallback)
        for future in (local, moved, fallback):
            print(dask_gpurt.explain(client, future))
            print()
        print(dask_gpurt.where(client, [large, other]))


if __name__ == "__main__":
    main()
