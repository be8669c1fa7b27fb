"""A recorded tree is a machine: facts are read below a root, and what is missing is empty."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import pytest

from dask_gpurt.backends.system import System, node_class, stack
from dask_gpurt.model.node_class import Gpu

if TYPE_CHECKING:
    from pathlib import Path

GiB = 2**30

FILES = {
    "proc/cpuinfo": "".join(
        f"processor\t: {i}\nmodel name\t: Intel(R) Xeon(R)  Platinum 8480C @ 2.00GHz\n\n" for i in range(4)
    ),
    "proc/meminfo": "MemTotal:       2113216000 kB\nMemFree: 1 kB\n",
    "proc/self/mounts": (
        "/dev/a / ext4 rw 0 0\nproc /proc proc rw 0 0\n/dev/b /scratch\\040one xfs rw 0 0\n"
        "/dev/c /data ext4 rw 0 0\n/dev/d /data xfs rw 0 0\nbroken\n"
    ),
    "sys/class/net/eth0/speed": "400000\n",
    "sys/class/net/eth0/device/vendor": "0x15b3\n",
    "sys/class/net/eth1/speed": "-1\n",
    "sys/class/net/eth1/device/vendor": "0x15b3\n",
    "sys/class/net/docker0/speed": "10000\n",
}


def tree(root: Path, files: dict[str, str] = FILES) -> System:
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return System(root)


def test_a_recorded_tree(tmp_path: Path) -> None:
    gpus = [Gpu(vendor="NVIDIA", model="NVIDIA H200", memory_bytes=140 * GiB)] * 8
    found = node_class(tree(tmp_path), "/scratch one/x", gpus, {"python": "3.11"})
    assert found.cpu == "Intel(R) Xeon(R) Platinum 8480C @ 2.00GHz"
    assert found.cores == 4
    assert found.memory_bytes == 2113216000 * 1024
    assert found.nics == (400 * 10**9,), "no bridge, and no card without a link"
    assert found.filesystem == "xfs"
    assert found.stack == (("python", "3.11"),)
    assert found.key == "h200-8x140g.xeon-platinum-8480c.4c.2000g.xfs.400gbit"


def test_an_empty_tree(tmp_path: Path) -> None:
    found = node_class(System(tmp_path), "/", (), {})
    assert (found.cores, found.memory_bytes, found.nics, found.filesystem) == (0, 0, (), "")
    assert found.cpu == platform.machine()
    assert System(tmp_path).throttled_seconds() == System(tmp_path).waited_seconds() == 0.0


@pytest.mark.parametrize(
    ("directory", "kind"),
    [("/", "ext4"), ("/scratch", "ext4"), ("/scratch one", "xfs"), ("/data/x", "xfs"), ("/database", "ext4")],
)
def test_the_file_system_of_a_folder(directory: str, kind: str, tmp_path: Path) -> None:
    assert tree(tmp_path).filesystem(directory) == kind


@pytest.mark.parametrize(
    ("files", "seconds"),
    [
        ({"proc/self/cgroup": "0::/pod/x\n", "sys/fs/cgroup/pod/x/cpu.stat": "throttled_usec 1500000\n"}, 1.5),
        # In a container the group is the root of what is mounted.
        ({"proc/self/cgroup": "0::/pod/x\n", "sys/fs/cgroup/cpu.stat": "nr_throttled 1\nthrottled_usec 500000\n"}, 0.5),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/x\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.stat": "throttled_time 2000000000\n",
            },
            2.0,
        ),
        ({"proc/self/cgroup": "3:memory:/x\nodd\n", "sys/fs/cgroup/memory/x/cpu.stat": "throttled_time 1\n"}, 0.0),
    ],
)
def test_throttled_by_a_control_group(files: dict[str, str], seconds: float, tmp_path: Path) -> None:
    assert tree(tmp_path, files).throttled_seconds() == seconds


def test_waits_for_a_cpu(tmp_path: Path) -> None:
    assert tree(tmp_path, {"proc/thread-self/schedstat": "1 2500000000 3\n"}).waited_seconds() == 2.5


def test_this_machine() -> None:
    here = System()
    assert here.cores() >= 1
    assert here.memory_bytes() > 2**28
    assert here.filesystem("/proc/self") == "proc"
    assert here.waited_seconds() >= 0


def test_the_stack_is_what_is_installed() -> None:
    import distributed

    found = stack("570.1")
    assert found["distributed"] == distributed.__version__
    assert found["driver"] == "570.1"
    assert found["python"] == platform.python_version()
    assert "driver" not in stack()
