"""What is learned of workers whose tasks vary by chance: identical ones stay equal, slow ones are found soon."""

from __future__ import annotations

import heapq
import math
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dask_gpurt.placement.tables.cluster_speed import SLOW
from dask_gpurt.placement.tables.durations import Durations, Prefix
from dask_gpurt.placement.tables.worker_speed import Speed

if TYPE_CHECKING:
    from collections.abc import Callable

WORKERS = 8
SEEDS = 6


def lognormal(sigma: float) -> Callable[[random.Random], float]:
    return lambda rnd: rnd.gauss(0, sigma)


def heavy(sigma: float) -> Callable[[random.Random], float]:
    """One task in twenty takes 3 to 30 times as long."""
    return lambda rnd: rnd.gauss(0, sigma) + (math.log(rnd.uniform(3, 30)) if rnd.random() < 0.05 else 0.0)


def bimodal(rnd: random.Random) -> float:
    return math.log(10) if rnd.random() < 0.3 else rnd.gauss(0, 0.1)


class Cluster:
    """Workers of one thread that draw tasks of one prefix; the first worker is `slow` times slower."""

    def __init__(
        self, noise: Callable[[random.Random], float], seed: int, slow: float = 1.0, first: float = 0.0
    ) -> None:
        self.rnd = random.Random(seed)
        self.noise = noise
        self.slow = slow
        self.first = first
        self.durations = Durations()
        self.kind = self.durations.prefix("f")
        self.workers: list[Any] = [
            SimpleNamespace(
                speed=Speed(), slowness=1.0, speed_samples=0, passed_over=0, ws=SimpleNamespace(nthreads=1), ran=0
            )
            for _ in range(WORKERS)
        ]
        self.queue = [(0.0, i, 0.0) for i in range(WORKERS)]

    def step(self) -> None:
        now, i, seconds = heapq.heappop(self.queue)
        w = self.workers[i]
        if seconds:
            self.durations.learn(self.kind, w, seconds, 0)
            w.ran += 1
        seconds = 0.1 * math.exp(self.noise(self.rnd)) * (self.slow if i == 0 else 1.0) + (0 if w.ran else self.first)
        heapq.heappush(self.queue, (now + seconds, i, seconds))

    def relative(self) -> list[float]:
        usual = sorted(w.slowness for w in self.workers)[WORKERS // 2]
        return [w.slowness / usual for w in self.workers]


@pytest.mark.parametrize(
    ("noise", "allowed"),
    [
        *((lognormal(sigma), 0.005) for sigma in (0.1, 0.2, 0.4, 0.6, 0.8)),
        (heavy(0.2), 0.005),
        (heavy(0.5), 0.005),
        (bimodal, 0.05),
    ],
    ids=["0.1", "0.2", "0.4", "0.6", "0.8", "heavy 0.2", "heavy 0.5", "bimodal"],
)
@pytest.mark.parametrize("first", [0.0, 1.0])
def test_identical_workers_are_equal(noise: Callable[[random.Random], float], allowed: float, first: float) -> None:
    wrong = looks = 0
    for seed in range(SEEDS):
        cluster = Cluster(noise, seed, first=first)
        for _ in range(400):
            cluster.step()
            found = cluster.relative()
            looks += len(found)
            wrong += sum(not 1 / SLOW <= x <= SLOW for x in found)
    assert wrong <= allowed * looks


@pytest.mark.parametrize(
    ("factor", "sigma", "tasks"), [(3.0, 0.1, 4), (3.0, 0.2, 5), (3.0, 0.4, 9), (10.0, 0.1, 4), (10.0, 0.4, 4)]
)
def test_a_slow_worker_is_found_within_a_few_tasks(factor: float, sigma: float, tasks: int) -> None:
    for seed in range(SEEDS):
        cluster = Cluster(lognormal(sigma), seed, slow=factor)
        slow = cluster.workers[0]
        while slow.ran <= tasks and cluster.relative()[0] <= SLOW:
            cluster.step()
        assert slow.ran <= tasks
        for _ in range(1000):
            cluster.step()
        assert factor / 2 < cluster.relative()[0] < factor * 1.5
        assert all(1 / SLOW < x < SLOW for x in cluster.relative()[1:])


def test_a_worker_that_is_slow_no_longer_is_found() -> None:
    cluster = Cluster(lognormal(0.2), 0, slow=5.0)
    for _ in range(600):
        cluster.step()
    assert cluster.relative()[0] > 3
    cluster.slow = 1.0
    ran = cluster.workers[0].ran
    while cluster.workers[0].ran < ran + 12:
        cluster.step()
    assert cluster.relative()[0] < SLOW


def test_a_mistake_about_all_workers_does_not_keep_itself_alive() -> None:
    # All tasks take three times as long from now on: two cores that run eight processes, say.
    cluster = Cluster(lognormal(0.1), 0)
    for _ in range(200):
        cluster.step()
    cluster.noise = lambda rnd: math.log(3) + rnd.gauss(0, 0.1)
    for _ in range(50 * WORKERS):
        cluster.step()
    assert cluster.kind.seconds == pytest.approx(0.3, rel=0.3)
    assert all(w.slowness == pytest.approx(1.0, rel=0.3) for w in cluster.workers)


def test_first_calls_count_until_there_are_others() -> None:
    p = Prefix("f")
    for seconds in (3.0, 1.2, 4.0, 5.0, 2.0):
        p.learn(seconds, 0, first=True)
    assert p.seconds == 2.0, "the lower quartile: some import, some only read"
    assert p.expected(True) == 3.0
    assert p.expected(False) is None
    p.learn(0.1, 0)
    assert p.seconds == 0.1
    p.learn(9.0, 0, first=True)
    assert p.seconds == 0.1


def test_first_is_counted_per_thread_and_prefix() -> None:
    s = Speed()
    assert [s.is_first("f", 2) for _ in range(4)] == [True, True, False, False]
    assert s.is_first("g", 2)
