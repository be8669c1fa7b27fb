"""For all tests: the rule about GPUs, an S3 server, patience with workers that start again, and short collections."""

from __future__ import annotations

import gc
import os
import urllib.request
from typing import TYPE_CHECKING, Any

import dask
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


# A LocalCluster closes a nanny for good whose worker is away for longer, also while it restarts. Dask's 15 s are too
# short on a busy machine.
dask.config.set({"distributed.deploy.lost-worker-timeout": "120 s"})
# Workers of a LocalCluster are forked from one process that has Dask imported, as in upstream's own tests: a worker
# costs half of the processor time. Those of `dask worker` are spawned, as by default.
dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})


# A full collection of garbage looks at the half a million objects of all test modules. That takes 0.4 s, and many tests
# ask for one. So what is there before the first test of a file is frozen. The tests of `memory.frozen` thaw it.
def pytest_configure() -> None:
    gc.disable()  # while tests are collected: until then there is next to no garbage


def pytest_collection_finish() -> None:
    gc.enable()
    freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if nextitem is None or nextitem.path != item.path:
        freeze()


def freeze() -> None:
    gc.collect()
    gc.freeze()


def gpu_missing() -> str:
    """Why there is no usable GPU here; "" when there is one: the backend allocated on it."""
    from dask_gpurt.backends import cuda

    return cuda.probe().reason


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or os.environ.get("GPURT_REQUIRE_GPU") == "1":
        return
    reason = gpu_missing()
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {reason}"))


@pytest.fixture(autouse=True)
def _gpu_is_there(request: pytest.FixtureRequest) -> None:
    """With GPURT_REQUIRE_GPU=1 a test that needs a GPU fails where there is none, instead of being skipped."""
    if request.node.get_closest_marker("gpu"):
        reason = gpu_missing()
        if reason:
            pytest.fail(f"GPURT_REQUIRE_GPU=1, but there is no GPU: {reason}")


class S3Server:
    """moto's server on a port of its own, and an empty bucket in it."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        self._make: Any = ThreadedMotoServer
        self._server: Any = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, self.port = self._server.get_host_and_port()
        self.endpoint = f"http://{host}:{self.port}"
        self.make_bucket()

    def make_bucket(self) -> None:
        import boto3

        # What moto keeps is in this process and survives its server.
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/moto-api/reset", method="POST")).close()
        boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        ).create_bucket(Bucket="bucket")

    def stop(self) -> None:
        self._server.stop()

    def restart(self) -> None:
        """On the same port, empty: what moto keeps is in its process and stays, but connections are gone."""
        self._server = self._make(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()


S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}


@pytest.fixture
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """An S3 server for one test; the environment names it, as a user's would."""
    pytest.importorskip("moto.server")
    pytest.importorskip("boto3")
    for name, value in S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    server = S3Server()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def s3_url(s3_server: S3Server) -> str:
    return "s3://bucket/some/prefix"
