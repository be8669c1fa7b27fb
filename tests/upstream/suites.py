"""Which upstream test files are run, and the overlay they are run from.

Overlay: a copy of the *installed* package, with the tests of the same version laid over it where the wheel has none,
in a folder of its own that comes first on ``PYTHONPATH``. So tests import their helpers by their real names
(``distributed.shuffle.tests.utils``), child processes find them too, pytest's compiled files stay out of the
environment, and nothing is ever written into site-packages. Rejected: a longer ``distributed.__path__`` (child
processes do not have it) and tests unpacked into site-packages (changes an environment that is not ours).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Suite:
    """One upstream test file: one process of pytest."""

    #: Path below the overlay, such as ``distributed/tests/test_spill.py``.
    path: str
    #: Send the computes of the local schedulers to a cluster (see `on_cluster`).
    on_cluster: bool = False
    #: pytest's ``-k`` expression; "" runs the whole file.
    keyword: str = ""
    #: A module without which all its tests are skipped; "" for none.
    needs: str = ""
    #: Whether its tests start clusters (or use that of `on_cluster`), so that the extension can be active at all.
    clusters: bool = True
    #: Seconds it takes about, alone and stock; only the order of a parallel run depends on it.
    about_seconds: float = 30.0

    @property
    def package(self) -> str:
        """``dask`` or ``distributed``."""
        return self.path.split("/", 1)[0]

    @property
    def module(self) -> str:
        """Dotted module name, the first part of its tests' junit class names."""
        return self.path.removesuffix(".py").replace("/", ".")

    @property
    def slug(self) -> str:
        """File name stem of its results."""
        return self.module


_EXPR = "dask/dataframe/dask_expr/tests"

#: 2,200 cases take half an hour on a cluster; most of them are combinations of aggregations, which never shuffle.
_GROUPBY_SHUFFLES = (
    "shuffle or split_out or apply or transform or full_groupby or on_index or sort_argument or hash_groupby"
)

SUITES = (
    Suite("dask/tests/test_distributed.py", about_seconds=50),
    Suite(f"{_EXPR}/test_distributed.py", about_seconds=20),
    Suite(f"{_EXPR}/test_diagnostics.py", needs="crick", about_seconds=10),
    Suite(f"{_EXPR}/test_shuffle.py", on_cluster=True, about_seconds=50),
    Suite(f"{_EXPR}/test_merge.py", on_cluster=True, about_seconds=80),
    Suite(f"{_EXPR}/test_groupby.py", on_cluster=True, about_seconds=110),
    Suite(f"{_EXPR}/test_concat.py", on_cluster=True, about_seconds=20),
    Suite("dask/dataframe/tests/test_shuffle.py", on_cluster=True, about_seconds=60),
    Suite("dask/dataframe/tests/test_multi.py", on_cluster=True, about_seconds=120),
    Suite("dask/dataframe/tests/test_merge_column_and_index.py", on_cluster=True, about_seconds=30),
    Suite("dask/dataframe/tests/test_groupby.py", on_cluster=True, keyword=_GROUPBY_SHUFFLES, about_seconds=100),
    Suite("dask/array/tests/test_rechunk.py", on_cluster=True, about_seconds=20),
    Suite("distributed/shuffle/tests/test_shuffle.py", about_seconds=95),
    Suite("distributed/shuffle/tests/test_merge.py", about_seconds=25),
    Suite("distributed/shuffle/tests/test_rechunk.py", about_seconds=40),
    Suite("distributed/tests/test_spill.py", clusters=False, about_seconds=3),
    Suite("distributed/tests/test_worker_memory.py", about_seconds=10),
    Suite("distributed/tests/test_steal.py", about_seconds=35),
    Suite("distributed/tests/test_scheduler.py", about_seconds=50),
    # Not for what they compute: they look at plugins, which every extension adds. They show that the switch works.
    Suite("distributed/diagnostics/tests/test_worker_plugin.py", about_seconds=5),
    Suite("distributed/diagnostics/tests/test_scheduler_plugin.py", about_seconds=5),
)

_TESTS = "distributed/tests/test_"
_SMALL = (
    *("active_memory_manager", "actor", "as_completed", "asyncio", "cancelled_state", "chaos", "client_executor"),
    *("client_loop", "cluster_dump", "collections", "computations", "dask_collections", "event_logging", "events"),
    *("gc", "locks", "multi_locks", "preload", "priorities", "publish", "queues", "reschedule", "resources"),
    *("semaphore", "spans", "spec", "stories", "stress", "tls_functional", "utils_test", "variable", "versions"),
    *("worker_client", "worker_metrics", "worker_state_machine"),
)
_COMMANDS = ("dask_scheduler", "dask_spec", "dask_worker", "tls_cli")
_DEPLOY = ("adaptive", "adaptive_core", "cluster", "local", "slow_adaptive", "spec_cluster", "subprocess")
_DIAGNOSTICS = (
    *("cluster_dump_plugin", "eventstream", "graph_layout", "install_plugin", "memory_sampler", "nanny_plugin"),
    *("progress", "progress_stream", "progressbar", "task_stream"),
)
#: The rest of distributed that starts clusters. Nothing here is about what the extension replaces: it must not show.
WIDE = (
    Suite(f"{_TESTS}client.py", about_seconds=300),
    Suite(f"{_TESTS}worker.py", about_seconds=150),
    Suite(f"{_TESTS}nanny.py", about_seconds=90),
    Suite(f"{_TESTS}failed_workers.py", about_seconds=60),
    *(Suite(f"{_TESTS}{name}.py") for name in _SMALL),
    *(Suite(f"distributed/cli/tests/test_{name}.py") for name in _COMMANDS),
    *(Suite(f"distributed/deploy/tests/test_{name}.py") for name in _DEPLOY),
    *(Suite(f"distributed/diagnostics/tests/test_{name}.py", about_seconds=10) for name in _DIAGNOSTICS),
    Suite("distributed/shuffle/tests/test_merge_column_and_index.py"),
    Suite("distributed/shuffle/tests/test_metrics.py", about_seconds=5),
)


def select(pattern: str | None, wide: bool = False) -> list[Suite]:
    """The suites whose path contains ``pattern`` (``*`` stands for anything; several with commas).

    None stands for `SUITES`, with ``wide`` for `WIDE`, too. Raises ValueError with the list of paths if none matches.
    """
    if pattern is None:
        return [*SUITES, *(WIDE if wide else ())]
    every = [*SUITES, *WIDE]
    parts = [".*".join(map(re.escape, p.strip().split("*"))) for p in pattern.split(",") if p.strip()]
    chosen = [s for s in every if any(re.search(p, s.path) for p in parts)]
    if not chosen:
        raise ValueError(f"no suite matches {pattern!r}; there are:\n  " + "\n  ".join(s.path for s in every))
    return chosen


def source_version(src: Path) -> str:
    """The version of a checkout of distributed.

    A checkout does not hold its version (it comes from the tag), but it pins dask to the same one: ``dask >=V,<W`` or
    ``dask == V``. Raises ValueError where ``src`` is no such checkout.
    """
    pyproject, tests = src / "pyproject.toml", src / "distributed" / "shuffle" / "tests"
    if not pyproject.is_file() or not tests.is_dir():
        raise ValueError(
            f"{src} is no checkout of dask/distributed: it lacks pyproject.toml or distributed/shuffle/tests"
        )
    found = re.search(r"""["']dask\s*(?:>=\s*([0-9.]+)\s*,|==\s*([0-9.]+)["'])""", pyproject.read_text())
    if not found:
        raise ValueError(f"{pyproject} does not pin dask (dask >=VERSION,<NEXT): its version cannot be known")
    return found.group(1) or found.group(2)


def _installed(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(f"{package} is not installed for this Python")
    return Path(spec.origin).parent


def make_overlay(package: str, target: Path, ini: Path, src: Path | None = None) -> None:
    """Makes ``target`` anew: a copy of the installed ``package`` and, from ``src``, its tests and conftest.

    The pytest configuration is that of ``src`` or, for dask, whose wheel has none, the file ``ini``.
    """
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    no_cache = shutil.ignore_patterns("__pycache__")
    shutil.copytree(_installed(package), target / package, ignore=no_cache)
    if src is None:
        shutil.copy(ini, target / "pytest.ini")
        return
    for tests in sorted((src / package).rglob("tests")):
        if tests.is_dir():
            shutil.copytree(tests, target / tests.relative_to(src), ignore=no_cache, dirs_exist_ok=True)
    for plugin in (src / package).glob("pytest_*.py"):  # the conftest loads it, and older wheels lack it
        shutil.copy(plugin, target / package)
    shutil.copy(src / "conftest.py", target)
    shutil.copy(src / "pyproject.toml", target)


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    found = {}
    for name in ("dask", "distributed", "pandas", "numpy", "pyarrow", "pytest"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
