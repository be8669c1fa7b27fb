"""T6: throttling by a real cgroup where one can be made, else by a recorded tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dask_gpurt.backends.system import System
from dask_gpurt.doctor.cpu import CHECK, quota
from dask_gpurt.doctor.finding import State

from .trees import Tree, inside, node, real_cgroup, told

if TYPE_CHECKING:
    from pathlib import Path

V2 = {"proc/self/cgroup": "0::/pod/c1\n", "sys/fs/cgroup/pod/c1/cpu.max": "200000 100000\n"}
V1 = {
    "proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/pod\n0::/\n",
    "sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu/pod/cpu.cfs_period_us": "100000\n",
}


def stat(periods: int, throttled: int) -> str:
    return f"usage_usec 5\nnr_periods {periods}\nnr_throttled {throttled}\nthrottled_usec 7\n"


@pytest.mark.parametrize(("files", "folder"), [(V2, "sys/fs/cgroup/pod/c1"), (V1, "sys/fs/cgroup/cpu/pod")])
@pytest.mark.parametrize(
    ("before", "after", "state"),
    [
        ((1000, 900), (1000, 900), State.FAIL),  # since it was made
        ((100000, 0), (100015, 14), State.FAIL),  # in the window
        ((100000, 0), (100020, 2), State.WARN),
        ((100000, 0), (100005, 5), State.OK),  # five periods say nothing
        ((1000, 10), (1010, 10), State.OK),
    ],
)
def test_throttling(
    tmp_path: Path,
    files: dict[str, str],
    folder: str,
    before: tuple[int, int],
    after: tuple[int, int],
    state: State,
) -> None:
    name = f"{folder}/cpu.stat"
    tree = Tree(tmp_path, {**files, name: stat(*before)}, {name: stat(*after)})
    verdicts = [v for v in CHECK.look(node(tree)) if "periods" in v.found or "not stopped" in v.found]
    assert [v.state for v in verdicts] == [state]
    if state is State.FAIL:
        assert f"by the quota of {folder}" in verdicts[0].found
        assert "--nthreads" in verdicts[0].remedy


@pytest.mark.parametrize(("files", "granted"), [(V2, 2.0), (V1, 1.5), ({}, None)])
def test_threads_and_quota(tmp_path: Path, files: dict[str, str], granted: float | None) -> None:
    tree = Tree(tmp_path, files)
    assert quota(tree) == granted
    warned = told(CHECK, node(tree, threads=4), State.WARN)
    assert len(warned) == (granted is not None)
    if granted:
        assert f"4 threads, and a quota of {granted:.3g}" in warned[0].found
        assert f"--nthreads {int(granted)}," in warned[0].remedy
    assert not told(CHECK, node(tree, threads=1), State.WARN)


def test_a_quota_around_the_group_counts(tmp_path: Path) -> None:
    outer = {"sys/fs/cgroup/pod/cpu.max": "50000 100000\n", "sys/fs/cgroup/pod/c1/cpu.max": "max 100000\n"}
    assert quota(Tree(tmp_path, {**V2, **outer})) == 0.5


def test_steal_heat_and_frequency(tmp_path: Path) -> None:
    cpu0 = "sys/devices/system/cpu/cpu0"
    tree = Tree(
        tmp_path,
        {
            "proc/stat": "cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 1\n",
            f"{cpu0}/thermal_throttle/core_throttle_count": "3\n",
            f"{cpu0}/cpufreq/scaling_max_freq": "1200000\n",
            f"{cpu0}/cpufreq/cpuinfo_max_freq": "3600000\n",
        },
        {
            "proc/stat": "cpu  140 0 100 840 0 0 0 20 0 0\ncpu0 1\n",
            f"{cpu0}/thermal_throttle/core_throttle_count": "5\n",
        },
    )
    found = [v.found for v in told(CHECK, node(tree), State.WARN)]
    assert found == [
        "the host keeps 20% of this machine's processors for others",
        "processors were slowed 2 times because of heat in 0.01 s",
        "processors are limited to 1.2 of 3.6 GHz",
    ]


@pytest.mark.parametrize(
    ("boost", "allowed", "text"),
    [
        ("1", 2450000, ""),
        ("1", 1500000, "processors are limited to 1.5 of 2.5 GHz"),
        ("0", 2450000, "processors are limited to 2.5 of 3.5 GHz"),
    ],
)
def test_a_processor_that_boosts_by_itself(tmp_path: Path, boost: str, allowed: int, text: str) -> None:
    """An EPYC under acpi-cpufreq, as it is after the start."""
    cpu0 = "sys/devices/system/cpu/cpu0/cpufreq"
    files = {
        "sys/devices/system/cpu/cpufreq/boost": f"{boost}\n",
        f"{cpu0}/scaling_available_frequencies": "2450000 2000000 1500000 \n",
        f"{cpu0}/scaling_max_freq": f"{allowed}\n",
        f"{cpu0}/cpuinfo_max_freq": "3529052\n",
    }
    assert [v.found for v in told(CHECK, node(Tree(tmp_path, files)), State.WARN)] == [text] * bool(text)


def test_nothing_is_known_of_an_empty_tree(tmp_path: Path) -> None:
    assert [v.state for v in CHECK.look(node(Tree(tmp_path, {})))] == [State.OK, State.OK]


_CODE = """
import threading
from dask_gpurt.doctor.cpu import CHECK
from tests.doctor.trees import node
def spin():
    while True:
        pass
threading.Thread(target=spin, daemon=True).start()
for v in CHECK.look(node(threads=2, window_seconds=2.0)):
    print(v.state, v.found, "|", v.remedy, flush=True)
"""


def test_a_real_quota_of_twenty_per_cent() -> None:
    with real_cgroup("cpu", ("cpu.cfs_quota_us", "cpu.max"), "20000") as group:
        out = inside(group, _CODE)
    lines = out.splitlines()
    (stopped,) = [line for line in lines if line.startswith("fail")]
    assert "periods by the quota of sys/fs/cgroup" in stopped
    assert any(line.startswith("warn 2 threads, and a quota of 0.2 processors | --nthreads 1") for line in lines), out


def test_this_machine() -> None:
    assert [v for v in CHECK.look(node(System())) if v.found]
