"""A client needs nothing that only Linux has: it may run on macOS or Windows."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from distributed import LocalCluster

import dask_gpurt

#: what our own modules must not import or look up on a client; Dask's may, where it is there
_BLOCK = """
    import sys, os, mmap, select, socket
    import dask.dataframe, distributed, distributed.deploy

    gone = {"fcntl", "resource", "pwd", "grp", "termios", "syslog", "posix", "tty", "pty", "spwd", "crypt"}

    class Blocked:
        def find_spec(self, name, path=None, target=None):
            frame = sys._getframe(1)
            while frame is not None and "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            if name in gone and "dask_gpurt" in frame.f_globals.get("__name__", ""):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in gone:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Blocked())
    for module, names in (
        (os, ("O_DIRECT", "eventfd", "EFD_NONBLOCK", "EFD_CLOEXEC", "posix_fadvise", "POSIX_FADV_DONTNEED")),
        (os, ("preadv", "pwritev")),
        (mmap, ("MADV_HUGEPAGE", "MADV_DONTNEED", "MADV_FREE")),
        (select, ("epoll",)),
    ):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
"""


def run(code: str, *arguments: str) -> str:
    text = textwrap.dedent(_BLOCK) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", text, *arguments], capture_output=True, text=True, check=False, timeout=150
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_block_blocks() -> None:
    code = """
    try:
        import dask_gpurt.tiers.storage.disk.direct_io
    except (ImportError, AttributeError):
        print("blocked")
    """
    assert run(code) == "blocked\n"


def test_a_client_imports_no_half_of_the_extension() -> None:
    code = """
    import dask_gpurt
    from dask_gpurt import attach, detach, explain, record, report, status, where
    import dask_gpurt.cli
    ours = {name.split(".")[1] for name in sys.modules if name.startswith("dask_gpurt.")}
    assert not ours & {"tiers", "shuffle", "placement", "extension", "memory", "backends"}, ours
    """
    run(code)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_client_elsewhere_asks_everything(tmp_path) -> None:  # type: ignore[no-untyped-def]
    code = """
    from distributed import Client
    import dask_gpurt
    address, folder = sys.argv[1:]
    with Client(address) as client:
        assert not dask_gpurt.status(client).installed
        assert dask_gpurt.attach(client).installed
        x = client.submit(abs, -1, key="x")
        assert x.result() == 1
        assert len(repr(dask_gpurt.status(client)).splitlines()) <= 20
        assert dask_gpurt.explain(client, x).kind == "stock"
        assert len(dask_gpurt.where(client, x).places) == 1
        with dask_gpurt.report(os.path.join(folder, "run.html"), client):
            client.submit(abs, -2).result()
        with dask_gpurt.record(client, os.path.join(folder, "run.trace")):
            client.submit(abs, -3).result()
        from dask_gpurt.client.checkup import checkup
        assert any(f.found == "1 of 1 workers answered" for f in checkup(client, timeout=60))
        dask_gpurt.detach(client)
    """
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster:
        run(code, cluster.scheduler_address, str(tmp_path))
        assert not dask_gpurt.status(cluster.scheduler_address).installed
    assert (tmp_path / "run.html").exists()
    assert (tmp_path / "run.trace").exists()
