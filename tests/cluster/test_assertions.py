"""``python -O``: distributed's P2P shuffles hang there, so the start is refused with the reason."""

from __future__ import annotations

import subprocess
import sys
import textwrap

PROGRAM = textwrap.dedent(
    """
    import asyncio
    from distributed import Scheduler, Worker
    from dask_gpurt import preload
    import dask_gpurt
    from dask_gpurt.errors import InstallError, SeamMismatch
    from dask_gpurt.extension.worker import on_worker
    from dask_gpurt.shuffle import seam

    async def refused(server):
        try:
            await preload.install(server, {})
        except (SystemExit, InstallError) as e:
            text = str(e)
            assert "python -O" in text and "PYTHONOPTIMIZE" in text and "gpurt.on-error: stock" in text, text
            return
        raise SystemExit("not refused")

    async def main():
        async with (
            Scheduler(port=0, host="127.0.0.1", dashboard=False) as s,
            Worker(s.address, nthreads=1, dashboard=False) as w,
        ):
            plugins = dict(s.plugins)
            data = w.data
            await refused(s)
            await refused(w)
            if s.plugins != plugins or w.data is not data:
                raise SystemExit("something was changed")
            await preload.install(s, {"on-error": "stock"})
            await preload.install(w, {"on-error": "stock"})
            if s.plugins["shuffle"] is not plugins["shuffle"] or w.data is not data:
                raise SystemExit("something was installed")
            if "python -O" not in s.plugins["gpurt"].statistics()["parts"]["assertions"]:
                raise SystemExit("not shown for the scheduler")
            if "python -O" not in on_worker(w).statistics()["parts"]["assertions"]:
                raise SystemExit("not shown for the worker")
        try:
            dask_gpurt.local_cluster(n_workers=1)
        except InstallError as e:
            if "python -O" not in str(e):
                raise
        else:
            raise SystemExit("local_cluster was not refused")
        try:
            seam.check()
        except SeamMismatch as e:
            print("fine", e)

    asyncio.run(main())
    """
)


def test_python_without_assertions_is_refused():
    done = subprocess.run([sys.executable, "-O", "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fine")
    assert "nothing is installed" in done.stderr
