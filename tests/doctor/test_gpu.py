"""T1, T2, T5, T14, T15 on recordings made by hand: no GPU was used. And NVML's binding, on a library compiled here."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from dask_gpurt.backends.nvml import Device, Load, Snapshot
from dask_gpurt.cli import gpurt
from dask_gpurt.doctor import gpu, numa
from dask_gpurt.doctor.finding import State
from dask_gpurt.doctor.gpus import Recorded, visible, write

from .trees import Gpus, Tree, alone, node, told

if TYPE_CHECKING:
    from pathlib import Path

SEEN, DRIVEN, FREE, MIG = gpu.CHECKS
FIRST = Device(0, "GPU-aaaa-0", "H200", "0000:3b:00.0", 100, 10, uncorrected_errors=0)
SECOND = Device(1, "GPU-bbbb-1", "H200", "0000:5e:00.0", 100, 10)


def gpus(*devices: Device, **fields: Any) -> Gpus:
    return Gpus(Snapshot(driver="580.1", cuda_of_driver=13000, cuda_of_runtime=13000, devices=devices, **fields))


def pci(*devices: str, **more: str) -> dict[str, str]:
    out = {}
    for d in devices:
        out |= {f"sys/bus/pci/devices/{d}/{name}": text for name, text in more.items()}
        out |= {f"sys/bus/pci/devices/{d}/vendor": "0x10de\n", f"sys/bus/pci/devices/{d}/class": "0x030200\n"}
    return out


TWO = pci(FIRST.pci, SECOND.pci)


def test_a_gpu_that_has_fallen_off_the_bus(tmp_path: Path) -> None:
    tree = Tree(tmp_path, TWO)
    (found,) = told(SEEN, node(tree, gpu=gpus(FIRST)), State.FAIL)
    assert found.found == "recorded: 2 NVIDIA GPUs on the PCI bus, 1 known to the driver"
    assert "dmesg" in found.remedy
    assert not told(SEEN, node(tree, gpu=gpus(FIRST, SECOND)), State.FAIL)
    lost = node(tree, gpu=gpus(SECOND, reason="GPU 0: NVML: GPU is lost"), environ={"NVIDIA_VISIBLE_DEVICES": "0,1"})
    (found,) = told(SEEN, lost, State.FAIL)
    assert found.found.endswith("1 known to the driver (GPU 0: NVML: GPU is lost)")
    # A container that was given one of two.
    assert not told(SEEN, node(tree, gpu=gpus(FIRST), environ={"NVIDIA_VISIBLE_DEVICES": "GPU-aaaa-0"}), State.FAIL)
    (found,) = told(SEEN, node(tree, gpu=Gpus(Snapshot("NVML: Driver Not Loaded"))), State.FAIL)
    assert found.found.endswith("0 known to the driver (NVML: Driver Not Loaded)")
    lent = Tree(tmp_path / "lent", TWO | pci("0000:3b:00.4", "0000:3b:00.5", **{"physfn/vendor": "0x10de\n"}))
    assert not told(SEEN, node(lent, gpu=gpus(FIRST, SECOND)), State.FAIL)
    audio = {"sys/bus/pci/devices/x/vendor": "0x10de\n", "sys/bus/pci/devices/x/class": "0x040300\n"}
    assert [v.state for v in SEEN.look(node(Tree(tmp_path / "audio", audio)))] == [State.NA]


def test_a_worker_for_cpus_on_a_node_with_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its container has neither the devices nor libraries for them: that is as it should be."""
    import importlib.metadata

    from dask_gpurt.doctor.devices import CHECKS

    tree, nothing = Tree(tmp_path, TWO), Gpus(Snapshot("NVML: not found"))
    monkeypatch.setattr(importlib.metadata, "distributions", list)
    for check in (SEEN, CHECKS[1]):
        assert [v.state for v in check.look(node(tree, gpu=nothing))] == [State.NA]
        wanted = {**os.environ, "NVIDIA_VISIBLE_DEVICES": "all"}
        assert told(check, node(tree, gpu=nothing, environ=wanted), State.FAIL)


@pytest.mark.parametrize(
    "none",
    [
        *({"CUDA_VISIBLE_DEVICES": s} for s in ("", "-1", "-1,0")),
        *({"NVIDIA_VISIBLE_DEVICES": s} for s in ("void", "")),
    ],
    ids=str,
)
def test_a_worker_that_was_given_none_on_purpose(tmp_path: Path, none: dict[str, str]) -> None:
    """Its image has libraries for CUDA, as that of its neighbours."""
    from dask_gpurt.doctor.devices import CHECKS

    about = node(Tree(tmp_path / "container", TWO), gpu=Gpus(Snapshot("NVML: not found")), environ=none)
    for check in (SEEN, CHECKS[1]):
        assert [v.state for v in check.look(about)] == [State.NA]
    if "CUDA_VISIBLE_DEVICES" in none:  # outside of a container the devices are there
        tree = Tree(tmp_path / "host", TWO | {f"dev/{name}": "" for name in ("nvidiactl", "nvidia-uvm", "nvidia0")})
        about = node(tree, gpu=gpus(FIRST, SECOND), environ=none)
        assert [v.state for v in CHECKS[1].look(about)] == [State.NA]
        assert [v.state for v in SEEN.look(about)] == [State.OK]


def test_a_device_by_cdi(tmp_path: Path) -> None:
    """NVIDIA_VISIBLE_DEVICES is "void" there, and the process has its device."""
    from dask_gpurt.doctor.gpus import is_wanted

    tree = Tree(tmp_path, {"dev/nvidiactl": ""})
    assert is_wanted({"NVIDIA_VISIBLE_DEVICES": "void"}, tree)


@pytest.mark.parametrize(
    ("setting", "missing"),
    [
        *(("0,1", ""), ("0,2", "2"), ("GPU-aaaa", ""), ("GPU-cccc", "GPU-cccc")),
        *(("", ""), ("-1", ""), ("1,-1,7", ""), ("7,-1", "7")),
    ],
)
def test_an_index_that_is_not_there(tmp_path: Path, setting: str, missing: str) -> None:
    about = node(Tree(tmp_path, TWO), gpu=gpus(FIRST, SECOND), environ={"CUDA_VISIBLE_DEVICES": setting})
    found = told(SEEN, about, State.FAIL)
    assert bool(found) is bool(missing)
    if missing:
        assert f"and there is no {missing} among 2 devices" in found[0].found


@pytest.mark.parametrize(
    ("environ", "warns"),
    [
        ({"CUDA_VISIBLE_DEVICES": "1"}, True),
        ({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, False),
        ({"CUDA_VISIBLE_DEVICES": "GPU-aaaa"}, False),
        ({}, False),
    ],
)
def test_gpus_that_differ_are_counted_in_two_orders(tmp_path: Path, environ: dict[str, str], warns: bool) -> None:
    slow = dataclasses.replace(FIRST, name="T400")
    tree = Tree(tmp_path, TWO)
    found = [v.found for v in told(SEEN, node(tree, gpu=gpus(slow, SECOND), environ=environ), State.WARN)]
    assert found == ["recorded: CUDA_VISIBLE_DEVICES=1 counts GPUs of several models: H200, T400"] * warns
    assert not told(SEEN, node(tree, gpu=gpus(FIRST, SECOND), environ=environ), State.WARN)


@pytest.mark.parametrize(
    ("driver", "runtime", "state", "text"),
    [
        (12080, 13000, State.FAIL, "is for CUDA 12.8, and what is installed for CUDA 13"),
        (13000, 13010, State.WARN, "is for CUDA 13.0, the runtime is 13.1"),
        (13010, 13000, State.OK, "for CUDA 13.1, runtime 13.0"),
        (12080, 0, State.OK, "for CUDA 12.8, runtime unknown"),
    ],
)
def test_driver_and_runtime(driver: int, runtime: int, state: State, text: str) -> None:
    snapshot = Snapshot(driver="570.1", cuda_of_driver=driver, cuda_of_runtime=runtime, devices=(FIRST,))
    assert [text in v.found for v in told(DRIVEN, node(gpu=Gpus(snapshot)), state)] == [True]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"uncorrected_errors": 3}, "GPU 0 (GPU-aaaa-0) had 3 memory errors that could not be corrected"),
        ({"remap_pending": True}, "GPU 0 (GPU-aaaa-0) will replace a bad row of its memory at the next reset"),
        ({"remap_failed": True, "remap_pending": True}, "GPU 0 (GPU-aaaa-0) could not replace a bad row"),
    ],
)
def test_bad_memory(fields: dict[str, Any], text: str) -> None:
    (found,) = told(DRIVEN, node(gpu=gpus(dataclasses.replace(FIRST, **fields))), State.FAIL)
    assert text in found.found


def numa_tree(root: Path, cpus: str, width: int = 16) -> Tree:
    link = {"current_link_width": f"{width}\n", "max_link_width": "16\n"}
    return Tree(root, pci(FIRST.pci, numa_node="1\n", local_cpulist=f"{cpus}\n", **link))


def test_a_real_affinity_far_from_the_gpu(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    here = min(before)
    last = len(before) - 1
    about = {"gpu": gpus(FIRST)}
    try:
        os.sched_setaffinity(0, {here})
        (found,) = told(numa.CHECK, node(numa_tree(tmp_path / "a", "4096-4100"), **about), State.FAIL)
        assert found.found == "recorded: this process runs on none of the processors near GPU 0 (NUMA node [1])"
        assert found.remedy.startswith("numactl --cpunodebind=1 --membind=1 dask worker")
        assert not told(numa.CHECK, node(numa_tree(tmp_path / "b", f"{here},4096"), **about), State.FAIL)
        if last:
            os.sched_setaffinity(0, before)
            (found,) = told(numa.CHECK, node(numa_tree(tmp_path / "c", f"{here}"), **about), State.WARN)
            assert found.found.startswith(f"recorded: {last} of the {last + 1} processors of this process are far")
    finally:
        os.sched_setaffinity(0, before)


def test_a_gpu_with_half_of_its_lanes_and_links(tmp_path: Path) -> None:
    tree = numa_tree(tmp_path, "0-4096", width=8)
    linked = dataclasses.replace(FIRST, nvlinks=(True, False, True, False))
    about = node(tree, gpu=gpus(linked))
    (found,) = told(numa.CHECK, about, State.FAIL)
    assert found.found == "recorded: GPU 0 (0000:3b:00.0) is linked by 8 of 16 lanes of PCIe"
    (found,) = told(numa.CHECK, about, State.WARN)
    assert found.found == "recorded: 2 of 4 NVLinks of GPU 0 are down: 1, 3"
    unwired = dataclasses.replace(FIRST, nvlinks=(False, False))
    assert not told(numa.CHECK, node(tree, gpu=gpus(unwired)), State.WARN)


def test_a_card_with_half_of_its_lanes(tmp_path: Path) -> None:
    card = "sys/bus/pci/devices/0000:9b:00.0"
    tree = Tree(tmp_path, {**pci(FIRST.pci), f"{card}/current_link_width": "4", f"{card}/max_link_width": "16"})
    folder = tmp_path / "sys/class/infiniband/mlx5_0"
    folder.mkdir(parents=True)
    (folder / "device").symlink_to(tmp_path / card)
    (found,) = told(numa.CHECK, node(tree, gpu=gpus(FIRST)), State.FAIL)
    assert "mlx5_0 (0000:9b:00.0) is linked by 4 of 16 lanes" in found.found


def test_only_visible_gpus_count(tmp_path: Path) -> None:
    tree = numa_tree(tmp_path, "4096")
    about = node(tree, gpu=gpus(FIRST, SECOND), environ={"CUDA_VISIBLE_DEVICES": "1"})
    assert not told(numa.CHECK, about, State.FAIL)


def test_what_is_named_after_a_gpu_that_is_not_there_is_hidden() -> None:
    snapshot = Snapshot(devices=(FIRST, SECOND))
    for setting, there in (("1,0", [SECOND, FIRST]), ("1,-1,0", [SECOND]), ("7,0", []), ("-1", [])):
        assert visible({"CUDA_VISIBLE_DEVICES": setting}, snapshot) == there


def test_workers_of_nannies_are_no_strangers(tmp_path: Path) -> None:
    spawned = "python\0-c\0from multiprocessing.spawn import spawn_main\0--multiprocessing-fork\0"
    files = {f"proc/{pid}/cmdline": spawned for pid in (77, 78, 79, 80, 81)}
    parents = {77: 88, 78: 79, 79: 88, 80: 90, 81: os.getppid()}
    files |= {f"proc/{pid}/status": f"Name:\tpython\nPPid:\t{parent}\n" for pid, parent in parents.items()}
    files |= {"proc/88/cmdline": "/opt/bin/dask\0worker\0", "proc/90/cmdline": "python\0train.py\0"}
    used = dataclasses.replace(FIRST, processes=((77, 30), (78, 20), (80, 10), (81, 40)))
    (found,) = told(FREE, node(Tree(tmp_path, files), gpu=gpus(used)), State.WARN)
    assert "other processes hold 10% of its memory, most of it process 80" in found.found


def test_strangers_and_a_full_device(tmp_path: Path) -> None:
    tree = Tree(tmp_path, {"proc/77/comm": "game\n", "proc/77/cmdline": "game\0", "proc/88/cmdline": "dask\0worker\0"})
    used = dataclasses.replace(FIRST, used_bytes=96, processes=((77, 6), (88, 60), (os.getpid(), 20)))
    found = [v.found for v in told(FREE, node(tree, gpu=gpus(used)), State.WARN)]
    assert found == [
        "recorded: GPU 0: other processes hold 6% of its memory, most of it process 77 (game)",
        "recorded: GPU 0: 0.0 of 0.0 GB in use",
    ]
    few = dataclasses.replace(FIRST, used_bytes=95, processes=((77, 5),))
    assert not told(FREE, node(tree, gpu=gpus(few)), State.WARN)


def test_a_real_pool_in_which_every_second_block_is_free(tmp_path: Path) -> None:
    """RMM's own pool, over ordinary memory: no GPU was used."""
    rmm = pytest.importorskip("rmm")
    from dask_gpurt.backends.rmm_stack import stack_over
    from dask_gpurt.tiers.device.oom import SpillOnFailure
    from tests.tiers.device.host_rmm import host_memory

    class Nothing:
        """No value is left to spill."""

        def make_room(self, nbytes: int) -> int:
            return 0

    block, count = 1 << 16, 64
    pool = rmm.mr.PoolMemoryResource(host_memory(), initial_pool_size=block * count, maximum_pool_size=block * count)
    stack = stack_over(pool, block * count, lambda nbytes: oom(nbytes))
    oom = SpillOnFailure(Nothing(), stack.headroom_bytes)  # type: ignore[arg-type]
    held = [rmm.DeviceBuffer(size=block, mr=stack.resource) for _ in range(count)]
    with pytest.raises(MemoryError):
        rmm.DeviceBuffer(size=block, mr=stack.resource)  # it is full
    assert oom.statistics()["fragmented"] == 0
    del held[::2]
    with pytest.raises(MemoryError):
        rmm.DeviceBuffer(size=8 * block, mr=stack.resource)
    (found,) = told(FREE, node(gpu=gpus(FIRST), fragmented=oom.statistics()["fragmented"]), State.FAIL)
    assert found.found == "1 allocations on the GPU failed although there was room for them"
    assert "asynchronous allocator" in found.remedy


MIGGED = dataclasses.replace(FIRST, mig=True, mig_pending=True, mig_uuids=("MIG-1", "MIG-2"))


@pytest.mark.parametrize(
    ("device", "setting", "text"),
    [
        (MIGGED, "MIG-2", ""),
        (MIGGED, "0", "CUDA_VISIBLE_DEVICES=0 is GPU 0, which is partitioned into 2 instances"),
        (MIGGED, None, "CUDA_VISIBLE_DEVICES=not set is GPU 0, which is partitioned into 2 instances"),
        (dataclasses.replace(MIGGED, mig_uuids=()), "0", "partitioned into 0 instances"),
        (dataclasses.replace(MIGGED, mig_pending=False), "MIG-1", "MIG of GPU 0 is on, and off after the next reset"),
        (dataclasses.replace(FIRST, mig=False, mig_pending=False), "0", ""),
    ],
)
def test_partitions(device: Device, setting: str | None, text: str) -> None:
    environ = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    found = told(MIG, node(gpu=gpus(device), environ=environ), State.FAIL)
    assert bool(found) is bool(text)
    if text:
        assert text in found[0].found
        assert "MIG-1" in found[0].remedy or "MIG-1" not in device.mig_uuids or setting == "MIG-1"


def test_a_recording_comes_back_as_it_was(tmp_path: Path) -> None:
    used = dataclasses.replace(MIGGED, processes=((1, 2),), nvlinks=(True, False))
    path = str(tmp_path / "r.json")
    write(gpus(used, SECOND), path)
    assert Recorded(path).look() == gpus(used, SECOND).look()


def test_the_command_writes_and_reads_recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dask_gpurt.doctor import registry

    monkeypatch.setattr(registry, "CHECKS", gpu.CHECKS)
    path = tmp_path / "r.json"
    got = CliRunner().invoke(gpurt, ["doctor", "--record", str(path)])
    assert got.exit_code in (0, 1, 2)
    assert "devices" in json.loads(path.read_text())
    write(gpus(dataclasses.replace(FIRST, uncorrected_errors=1)), str(path))
    got = CliRunner().invoke(gpurt, ["doctor", "--recorded", str(path)])
    assert got.exit_code == 2
    assert "recorded: GPU 0 (GPU-aaaa-0) had 1 memory errors" in got.output
    for broken in ("[]", "{", '{"devices": [{"nothing": 1}]}', '{"devices": [1]}', '{"other": 1}'):
        path.write_text(broken)
        got = CliRunner().invoke(gpurt, ["doctor", "--recorded", str(path)])
        assert got.exit_code == 2, broken
        assert "is not a recording" in got.output


_NVML = """
#include <string.h>
#define OK 0
#define UNSUPPORTED 3
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process_t;
static int mig; /* the instance's handle is its address */
int nvmlInitWithFlags(unsigned f) { return OK; }
int nvmlInit_v2(void) { return OK; }
int nvmlShutdown(void) { return OK; }
int nvmlSystemGetDriverVersion(char *t, unsigned n) { strcpy(t, "580.95.05"); return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13000; return OK; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)1; return OK; }
int nvmlDeviceGetUUID(void *h, char *t, unsigned n) { strcpy(t, h == &mig ? "MIG-m" : "GPU-u"); return OK; }
int nvmlDeviceGetName(void *h, char *t, unsigned n) { strcpy(t, "NVIDIA H200"); return OK; }
int nvmlDeviceGetPciInfo_v3(void *h, pci_t *p) { strcpy(p->bus_id, "00000000:3B:00.0"); return OK; }
int nvmlDeviceGetMemoryInfo(void *h, memory_t *m) { m->total = 1000; m->free = 600; m->used = 400; return OK; }
int nvmlDeviceGetTotalEccErrors(void *h, int type, int counter, unsigned long long *n) {
    *n = type == 1 && counter == 0 ? 7 : 99; return OK;
}
int nvmlDeviceGetRemappedRows(void *h, unsigned *c, unsigned *u, unsigned *p, unsigned *f) {
    *c = 5; *u = 6; *p = 1; *f = 0; return OK;
}
int nvmlDeviceGetCurrPcieLinkWidth(void *h, unsigned *w) { *w = 8; return OK; }
int nvmlDeviceGetCurrPcieLinkGeneration(void *h, unsigned *g) { *g = 5; return OK; }
int nvmlDeviceGetPcieThroughput(void *h, unsigned counter, unsigned *kib) {
    *kib = counter == 1 ? 15625000 : 1000; return OK; /* 16 of 32 GB/s in */
}
int nvmlDeviceGetUtilizationRates(void *h, unsigned *u) { u[0] = 25; u[1] = 60; return OK; }
int nvmlDeviceGetCurrentClocksEventReasons(void *h, unsigned long long *r) { *r = 0x44; return OK; }
int nvmlDeviceGetNvLinkState(void *h, unsigned i, int *on) { *on = i != 1; return i < 3 ? OK : UNSUPPORTED; }
int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *then) { *now = 1; *then = 0; return OK; }
int nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned *n) { *n = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned i, void **m) { *m = &mig; return i == 2 ? OK : 6; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, process_t *p) {
    if (*n < 1) { *n = 1; return 7; }
    *n = 1; p->pid = 4242; p->used = 300; return OK;
}
"""


def test_the_binding_of_nvml_on_a_compiled_library(tmp_path: Path) -> None:
    """A library of our own with NVML's functions: what pynvml makes of them, and we of that. No GPU was used."""
    pytest.importorskip("pynvml")
    cc = shutil.which("cc")
    if cc is None:
        pytest.skip("a C compiler is needed")
    (tmp_path / "nvml.c").write_text(_NVML)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run([cc, "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True)
    code = """
    import dataclasses, json
    from dask_gpurt.backends import nvml
    assert nvml.load(0) == nvml.look().devices[0].load
    print(json.dumps(dataclasses.asdict(nvml.look())))
    """
    got = Snapshot.from_dict(json.loads(alone(code, LD_LIBRARY_PATH=str(tmp_path))))
    assert (got.reason, got.driver, got.cuda_of_driver) == ("", "580.95.05", 13000)
    assert got.devices == (
        Device(
            index=0,
            uuid="GPU-u",
            name="NVIDIA H200",
            pci="0000:3b:00.0",
            memory_bytes=1000,
            used_bytes=400,
            uncorrected_errors=7,
            remap_pending=True,
            nvlinks=(True, False, True),
            mig=True,
            mig_pending=False,
            mig_uuids=("MIG-m",),
            processes=((4242, 300),),
            load=Load(kernels=0.25, link=0.5, clocks=0x44),
        ),
    )
