"""dask-cuda's real command, clusters, plugins and mapping with the extension: each combination works, or says why not.

Only the calls of the driver are replaced, see `no_driver/sitecustomize.py`: this shows who manages which memory, not
that a GPU computes. `bash ci/cuda.sh` makes an environment with dask-cuda and runs it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from distributed import Client
from distributed.utils_test import poll_for

import dask_gpurt

from .cuda_cases import VALUE_BYTES, seen
from .processes import Processes, processes, wait_text

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("dask_cuda", reason="dask-cuda is not installed; bash ci/cuda.sh makes an environment with it")
pytest.importorskip("rmm", reason="RMM is not installed; bash ci/cuda.sh makes an environment with it")

pytestmark = pytest.mark.cluster

HERE = Path(__file__).parent
NO_DRIVER = os.pathsep.join([str(HERE / "no_driver"), str(HERE.parents[1])])
NO_CUDF = os.pathsep.join([str(HERE / "no_cudf"), NO_DRIVER])
ENVIRONMENT = {
    "PYTHONPATH": NO_DRIVER,
    "CUDA_VISIBLE_DEVICES": "0",
    "DASK_DISTRIBUTED__DIAGNOSTICS__NVML": "False",
    "DASK_GPURT__TIERS__DEVICE": "auto",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Options of ``dask cuda worker``, and what a worker has with them where `tiers.device` is auto."""

    options: tuple[str, ...] = ()
    #: of worker.data with the setting "off", which is dask-cuda's own choice
    stock: str = "DeviceHostFile"
    #: part of the reason that our device tier stays off; "": it works
    off: str = ""
    #: what our stack of RMM must be over
    over: str = "CallbackMemoryResource"
    env: tuple[tuple[str, str], ...] = ()


CASES = {
    "plain": Case(over="CudaMemoryResource"),
    "pool": Case(("--rmm-pool-size", "30MB", "--rmm-maximum-pool-size", "60MB"), over="PoolMemoryResource"),
    "async": Case(("--rmm-async",)),
    "async-limited": Case(("--rmm-async", "--rmm-maximum-pool-size", "60MB"), over="LimitingResourceAdaptor"),
    "tracked": Case(("--rmm-async", "--rmm-track-allocations"), over="TrackingResourceAdaptor"),
    "logged": Case(("--rmm-async", "--rmm-log-directory", "."), over="LoggingResourceAdaptor"),
    "device-limit": Case(("--device-memory-limit", "20MB"), over="CudaMemoryResource"),
    "device-limit-and-pool": Case(
        ("--device-memory-limit", "20MB", "--rmm-pool-size", "100MB"), over="PoolMemoryResource"
    ),
    "no-device-limit": Case(("--device-memory-limit", "0"), off="values never leave the device"),
    "no-host-limit": Case(("--memory-limit", "0"), off="no limit of host memory"),
    "managed": Case(("--rmm-managed-memory",), off="managed memory, whose pages the driver moves"),
    "managed-pool": Case(("--rmm-managed-memory", "--rmm-pool-size", "100MB"), off="managed memory"),
    "cudf-spill": Case(("--enable-cudf-spill",), off="cuDF's own spilling is on", env=(("PYTHONPATH", NO_CUDF),)),
    "cudf-spill-and-pool": Case(
        ("--enable-cudf-spill", "--rmm-pool-size", "100MB"),
        off="cuDF's own spilling is on",
        env=(("PYTHONPATH", NO_CUDF),),
    ),
    "one-memory": Case(
        stock="TieredStore", off="device and host share one memory", env=(("NO_DRIVER_INTEGRATED", "1"),)
    ),
}
#: bytes that values may take on the "device", where dask-cuda's limits are lower than ours; of a pool, 0.8 of it
LIMITS = {
    "device-limit": 20_000_000,
    "device-limit-and-pool": 20_000_000,
    "pool": 48_000_000,
    "async-limited": 48_000_000,
}


def _worker(p: Processes, address: str, name: str, *options: str, env: tuple[tuple[str, str], ...] = ()) -> Any:
    return p.start(
        *("cuda", "worker", address, "--host", "127.0.0.1", "--no-dashboard", "--name", name),
        *("--local-directory", str(p.directory / name), *options),
        env=dict(env),
    )


def _address_of(client: Client, name: str) -> str:
    """The worker's, once it is there."""
    names = {w["name"]: address for address, w in client.scheduler_info(n_workers=-1)["workers"].items()}
    return str(names[name])


@pytest.fixture(scope="module", params=["auto", "off"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Client]]:
    """A scheduler with one setting, and a worker per case."""
    folder = tmp_path_factory.mktemp(request.param)
    with processes(folder, ENVIRONMENT) as p:
        setting = ["--gpurt-tiers-device", request.param]
        address = p.scheduler("--preload", "dask_gpurt.preload", *setting)
        started = {}
        for begun, (name, case) in enumerate(CASES.items(), 1):
            started[name] = _worker(p, address, name, *case.options, env=case.env)
            if begun % 3 == 0 or begun == len(CASES):  # a few at a time
                with Client(address) as client:
                    try:
                        client.wait_for_workers(begun, timeout=90)
                    except TimeoutError:
                        logs = {name: log.read_text()[-2000:] for name, (_, log) in started.items()}
                        raise AssertionError(f"a worker did not start: {logs}") from None
        with Client(address) as client:
            yield request.param, client


@pytest.mark.parametrize("name", CASES)
def test_dask_cuda_worker(name: str, cluster: tuple[str, Client]) -> None:
    setting, client = cluster
    case = CASES[name]
    got = seen(client, _address_of(client, name))
    assert got["sums"] == [4950] * 3
    assert set(got["parts"].values()) == {"on"}  # placement, fetches and observation, whatever the memory is
    if setting == "off" or case.off:
        assert got["data"] == case.stock
        assert got["device"] is None
        assert "FailureCallbackResourceAdaptor" not in got["memory"]  # what dask-cuda has installed stays as it was
        assert case.off in got["off"] if setting == "auto" else got["off"] == ""
        return
    assert got["data"] == "TieredStore"
    assert got["good"] is True
    device = got["device"]
    assert got["memory"][:3] == [
        *("FailureCallbackResourceAdaptor", "StatisticsResourceAdaptor", "LimitingResourceAdaptor")
    ]
    assert case.over in got["memory"][3:]
    assert device["resource_replaced"] == 0
    if name in LIMITS:
        assert device["limit_bytes"] == pytest.approx(LIMITS[name], abs=256)  # RMM's pools are aligned
        # 100 values were made, and as many as the limit allows have stayed.
        assert device["to_and_from_device"]["writes"] >= 100 - LIMITS[name] // VALUE_BYTES - 1


def test_status_says_why(cluster: tuple[str, Client]) -> None:
    setting, client = cluster
    status = dask_gpurt.status(client)
    assert not status.scheduler.get("refused")
    shown = str(status)
    tiers = {w["tiers"]["device_off"] for w in status.workers.values()}
    assert ("managed memory" in " ".join(tiers)) is (setting == "auto")
    assert shown.count("all with dask-gpurt") == 1
    with_tier = sum("device" in w["tiers"] for w in status.workers.values())
    assert with_tier == (sum(not case.off for case in CASES.values()) if setting == "auto" else 0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--rmm-async", "--rmm-managed-memory"), "`rmm_managed_memory` is incompatible with the `rmm_async`"),
        (("--rmm-release-threshold", "1MB"), "`rmm_release_threshold` requires `rmm_async`"),
        (("--enable-jit-unspill",), "No such option"),
        (("--enable-nvlink", "--rmm-managed-memory"), "RMM managed memory and NVLink are currently incompatible"),
    ],
)
def test_dask_cuda_refuses_by_itself(options: tuple[str, ...], says: str, tmp_path: Path) -> None:
    with processes(tmp_path, ENVIRONMENT) as p:
        process, log = _worker(p, "tcp://127.0.0.1:1", "x", *options)
        wait_text(log, says)
        assert process.wait(30) != 0


@pytest.mark.parametrize(
    ("options", "off", "env"),
    [
        (("--rmm-async",), "", ()),
        (("--rmm-managed-memory",), "managed memory", ()),
        (("--enable-cudf-spill",), "cuDF's own spilling is on", (("PYTHONPATH", NO_CUDF),)),
    ],
)
def test_a_preload_sees_what_dask_cudas_plugins_will_do(
    options: tuple[str, ...], off: str, env: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    """It runs before them, when RMM and cuDF are as they were."""
    with processes(tmp_path, ENVIRONMENT) as p:
        address = p.scheduler("--preload", "dask_gpurt.preload")
        _worker(p, address, "w", "--preload", "dask_gpurt.load", *options, env=env)
        with Client(address) as client:
            client.wait_for_workers(1, timeout=60)
            got = seen(client, _address_of(client, "w"))
    assert off in got["off"]
    assert (got["device"] is None) is (got["data"] == "DeviceHostFile") is (off != "")
    if not off:
        assert got["good"] is True
        assert got["device"]["resource_replaced"] == 1  # by RMMSetup, and stacked over before the first task


def test_on_refuses_the_start_with_the_remedy(tmp_path: Path) -> None:
    """A worker that was asked by its own preload ends; one that the scheduler asks runs stock, and says so."""
    on = {"DASK_GPURT__TIERS__DEVICE": "on"}
    with processes(tmp_path, ENVIRONMENT) as p:
        address = p.scheduler("--preload", "dask_gpurt.preload", "--gpurt-tiers-device", "on")
        process, log = p.start(
            *("cuda", "worker", address, "--host", "127.0.0.1", "--no-dashboard", "--name", "asked"),
            *("--local-directory", str(p.directory / "asked"), "--preload", "dask_gpurt.load", "--rmm-managed-memory"),
            env=on,
        )
        wait_text(log, "gpurt.tiers.device is 'on', and there is no tier: RMM allocates managed memory")
        assert "--rmm-async or --rmm-pool-size" in log.read_text()
        process.terminate()
        _worker(p, address, "sent", "--rmm-managed-memory")
        with Client(address) as client:
            client.wait_for_workers(1, timeout=60)
            sent = _address_of(client, "sent")
            got = seen(client, sent)
            refused = "gpurt.tiers.device is 'on', and there is no tier: RMM allocates managed memory"
            # The reason comes with the worker's next heartbeat.
            poll_for(lambda: refused in " ".join(str(dask_gpurt.status(client)).split()), timeout=30)
    assert got["parts"] is None
    assert got["data"] == "DeviceHostFile"  # as stock


@pytest.mark.parametrize("used", [False, True])
def test_attach_and_detach(used: bool, tmp_path: Path) -> None:
    """A mapping that holds keys is not replaced; one that is empty is, and comes back."""
    with processes(tmp_path, ENVIRONMENT) as p:
        address = p.scheduler()
        _worker(p, address, "w", "--rmm-async")
        with Client(address) as client:
            client.wait_for_workers(1, timeout=60)
            kept = client.submit(sum, range(10), key="kept")
            assert kept.result() == 45
            if not used:
                kept.release()
                _until_nothing_is_kept(client)
            dask_gpurt.attach(client, settings={"tiers.device": "auto"})
            got = seen(client, _address_of(client, "w"))
            assert got["data"] == ("DeviceHostFile" if used else "TieredStore")
            assert ("holds keys already" in got["off"]) is used
            assert got["good"] is (None if used else True)
            if not used:
                _until_nothing_is_kept(client)
            dask_gpurt.detach(client)
            assert client.run(lambda dask_worker: type(dask_worker.data).__name__) == {
                _address_of(client, "w"): "DeviceHostFile"
            }
            assert client.submit(sum, range(10), key="again").result() == 45
            if used:
                assert kept.result() == 45


def _until_nothing_is_kept(client: Client) -> None:
    poll_for(lambda: not any(client.run(lambda dask_worker: len(dask_worker.state.tasks)).values()), timeout=30)


#: name -> how, arguments, settings, what is seen
ON, OFF = {"tiers.device": "on"}, {"tiers.device": "off"}
CLUSTERS: dict[str, tuple[str, dict[str, Any], dict[str, str], dict[str, Any]]] = {
    "LocalCUDACluster": ("LocalCUDACluster", {}, {}, {"data": "TieredStore", "good": True}),
    "LocalCUDACluster, pool": (
        *("LocalCUDACluster", {"rmm_pool_size": "100MB"}, {}),
        {"data": "TieredStore", "good": True},
    ),
    "LocalCUDACluster, async": ("LocalCUDACluster", {"rmm_async": True}, {}, {"data": "TieredStore", "good": True}),
    "LocalCUDACluster, on": ("LocalCUDACluster", {}, ON, {"data": "TieredStore", "good": True}),
    "LocalCUDACluster, managed": (
        *("LocalCUDACluster", {"rmm_managed_memory": True}, {}),
        {"data": "DeviceHostFile", "off": "managed memory"},
    ),
    "LocalCUDACluster, own mapping": (
        *("LocalCUDACluster", {"data": None, "device_memory_limit": None, "memory_limit": None}, {}),
        {"data": "dict", "off": "plain dict"},
    ),
    "LocalCUDACluster, off": ("LocalCUDACluster", {"rmm_async": True}, OFF, {"data": "DeviceHostFile", "off": ""}),
    "gpus": ("local_cluster", {}, {}, {"data": "TieredStore", "good": True, "kind": "GpurtLocalCUDACluster"}),
    "gpus, off": ("local_cluster", {}, OFF, {"data": "DeviceHostFile", "off": ""}),
    "gpus, on": ("local_cluster", {"rmm_async": True}, ON, {"data": "TieredStore", "good": True}),
    "gpus, managed": (
        *("local_cluster", {"rmm_managed_memory": True}, {}),
        {"data": "DeviceHostFile", "off": "managed memory"},
    ),
    "gpus, awaited": ("await local_cluster", {}, {}, {"data": "TieredStore", "off": ""}),
    "gpus, awaited, JIT-unspill": (
        *("await local_cluster", {"jit_unspill": True}, {}),
        {"error": "InstallError", "text": "unexpected keyword argument 'jit_unspill'"},
    ),
    "gpus, one of them": ("local_cluster", {"gpus": [0]}, {}, {"data": "TieredStore"}),
    "gpus, all": ("local_cluster", {"gpus": "all"}, {}, {"data": "TieredStore"}),
    "gpus, a number too many": ("local_cluster", {"gpus": 2}, {}, {"error": "ConfigError", "text": "sees 1 (0)"}),
    "gpus, one that is not there": ("local_cluster", {"gpus": [1]}, {}, {"error": "ConfigError", "text": "'all'"}),
    "gpus, twice said": (
        *("local_cluster", {"CUDA_VISIBLE_DEVICES": "0"}, {}),
        {"error": "ConfigError", "text": "give gpus alone"},
    ),
    "gpus, managed memory and the tier": (
        *("local_cluster", {"rmm_managed_memory": True}, ON),
        {"error": "ConfigError", "text": "Remedy: --rmm-async"},
    ),
    "gpus, cuDF's spilling and the tier": (
        *("local_cluster", {"enable_cudf_spill": True}, ON),
        {"error": "ConfigError", "text": "enable_cudf_spill=False"},
    ),
    "gpus, no limit and the tier": (
        *("local_cluster", {"device_memory_limit": "0"}, ON),
        {"error": "ConfigError", "text": "--device-memory-limit 0"},
    ),
    "gpus, what dask-cuda refuses": (
        *("local_cluster", {"rmm_async": True, "rmm_managed_memory": True}, {}),
        {"error": "ValueError", "text": "incompatible"},
    ),
    "gpus, JIT-unspill": (
        *("local_cluster", {"jit_unspill": True}, {}),
        {"error": "InstallError", "text": "unexpected keyword argument 'jit_unspill'"},
    ),
    "gpus, a pool that cannot be had": (
        *("local_cluster", {"rmm_pool_size": "1 PiB"}, {}),
        {"error": "InstallError", "text": "the cluster did not start: MemoryError"},
    ),
}


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = [[name, how, arguments, settings] for name, (how, arguments, settings, _) in CLUSTERS.items()]
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.cuda_cases"],
        input=json.dumps(cases),
        env={**os.environ, **ENVIRONMENT, "DASK_JIT_UNSPILL": "True"},  # a leftover that nothing reads any more
        cwd=tmp_path_factory.mktemp("clusters"),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.mark.parametrize("name", CLUSTERS)
def test_local_clusters(name: str, clusters: dict[str, dict[str, Any]]) -> None:
    got = clusters[name]
    for key, value in CLUSTERS[name][-1].items():
        if key in ("off", "text") and value:
            assert value in got[key], got
        else:
            assert got[key] == value, got
    if "error" in got:
        assert got["loops"] == 0  # what was started is closed
    else:
        assert got["sums"] == [4950] * 3


def test_without_a_gpu_it_says_so() -> None:
    """With NVML as it is on this machine."""
    code = "import dask_gpurt\ntry:\n dask_gpurt.local_cluster(gpus=1)\nexcept Exception as e:\n print(repr(e))"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    if not done.stdout:
        pytest.skip("there is a GPU")
    assert "InstallError('gpus is 1, and this process sees no GPU (NVML" in done.stdout
    assert "Remedy" in done.stdout
