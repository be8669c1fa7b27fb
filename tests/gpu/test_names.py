"""Every call of a GPU's libraries, in the package and in what runs on a GPU, is one that the installed libraries take.

Needs no GPU: RAPIDS can be imported without one (``ci/gpu/dry.sh`` makes the environment). Where a library is not
installed, its tests are skipped, and say so.

No call can escape. What is reached by an import is found by the syntax tree (`calls`). What is called on an object,
such as a column that another call gave, is looked up in `METHODS`. A name that is in none of these tables, and that the
classes of a library have, fails `test_nothing_escapes`: then it belongs into `METHODS`, or, where the object is none of
a library's, into `SHARED`.
"""

from __future__ import annotations

import ast
import collections
import functools
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gpu import calls
from tests.gpu.calls import Absent, Source, found, method_takes, signature_of, takes

ROOT = Path(__file__).parents[2]
BACKENDS = sorted((ROOT / "dask_gpurt" / "backends").glob("*.py"))
#: what runs on a GPU besides, and on nothing else
ON_A_GPU = [
    *sorted((ROOT / "benchmarks" / "gpu").glob("*.py")),
    *(ROOT / "tests" / "gpu" / name for name in ("test_device.py", "test_ucx_device.py", "test_dask_cuda.py")),
]


def names_of(text: str) -> frozenset[str]:
    return frozenset(text.split())


_UCXX = "ucxx._lib.libucxx"
_RMM = "rmm.pylibrmm.memory_resource._memory_resource"
_CUDF = ("cudf.DataFrame", "cudf.Series", "cudf.Index")
#: called on, or read of, objects of a library in `dask_gpurt.backends`: name -> the classes (or modules) that have it
METHODS: dict[str, tuple[str, ...]] = {
    # cuDF
    "to_pylibcudf": _CUDF,
    "astype": ("cudf.DataFrame", "cudf.Index"),
    "rename": ("cudf.Index",),
    "dtype": ("cudf.Series", "cudf.Index"),
    "dtypes": ("cudf.DataFrame",),
    "index": ("cudf.DataFrame", "cudf.Series"),
    "attrs": ("cudf.DataFrame", "cudf.Series"),
    "flags": ("cudf.DataFrame", "cudf.Series"),
    "categories": ("cudf.CategoricalDtype",),
    "ordered": ("cudf.CategoricalDtype",),
    "precision": ("cudf.Decimal32Dtype", "cudf.Decimal64Dtype", "cudf.Decimal128Dtype"),
    "scale": ("cudf.Decimal32Dtype", "cudf.Decimal64Dtype", "cudf.Decimal128Dtype"),
    "_columns": ("cudf.MultiIndex",),
    "start": ("cudf.RangeIndex",),
    "stop": ("cudf.RangeIndex",),
    "step": ("cudf.RangeIndex",),
    # pylibcudf
    "columns": ("pylibcudf.Table", "cudf.DataFrame"),
    "num_rows": ("pylibcudf.Table",),
    "type": ("pylibcudf.Column",),
    "null_count": ("pylibcudf.Column",),
    "offset": ("pylibcudf.Column",),
    "null_mask": ("pylibcudf.Column",),
    "child": ("pylibcudf.Column",),
    "children": ("pylibcudf.Column",),
    "num_children": ("pylibcudf.Column",),
    "to_arrow": ("pylibcudf.Column",),
    "data": ("pylibcudf.Column", "cupy.ndarray"),
    "size": ("pylibcudf.Column", "rmm.DeviceBuffer"),
    "id": ("pylibcudf.DataType",),
    "typestr": ("pylibcudf.DataType",),
    "ptr": ("pylibcudf.gpumemoryview", "rmm.DeviceBuffer", "cupy.cuda.MemoryPointer"),
    "nbytes": ("pylibcudf.gpumemoryview", "cupy.ndarray"),
    "release": ("pylibcudf.contiguous_split.PackedColumns",),
    "has_next": ("pylibcudf.contiguous_split.ChunkedPack",),
    "next": ("pylibcudf.contiguous_split.ChunkedPack",),
    "get_total_contiguous_size": ("pylibcudf.contiguous_split.ChunkedPack",),
    "build_metadata": ("pylibcudf.contiguous_split.ChunkedPack",),
    # RMM
    "allocate": (f"{_RMM}.DeviceMemoryResource",),
    "deallocate": (f"{_RMM}.DeviceMemoryResource",),
    "get_upstream": (f"{_RMM}.UpstreamResourceAdaptor",),
    "pool_size": (f"{_RMM}.PoolMemoryResource",),
    "get_allocated_bytes": (f"{_RMM}.LimitingResourceAdaptor",),
    "get_allocation_limit": (f"{_RMM}.LimitingResourceAdaptor",),
    "allocation_counts": (f"{_RMM}.StatisticsResourceAdaptor",),
    "synchronize": ("rmm.pylibrmm.stream.Stream",),
    "__cuda_stream__": ("rmm.pylibrmm.stream.Stream",),
    "tobytes": ("rmm.DeviceBuffer", f"{_UCXX}.UCXAddress"),
    # CuPy
    "mem": ("cupy.cuda.MemoryPointer",),
    "device_id": ("cupy.cuda.MemoryPointer",),
    # UCX
    "UCXAddress": (_UCXX,),
    "UCXEndpoint": (_UCXX,),
    "create_from_buffer": (f"{_UCXX}.UCXAddress",),
    "create_from_worker_address": (f"{_UCXX}.UCXEndpoint",),
    "address": (f"{_UCXX}.UCXWorker",),
    "arm": (f"{_UCXX}.UCXWorker",),
    "cancel_inflight_requests": (f"{_UCXX}.UCXWorker",),
    "epoll_file_descriptor": (f"{_UCXX}.UCXWorker",),
    "init_blocking_progress_mode": (f"{_UCXX}.UCXWorker",),
    "progress_once": (f"{_UCXX}.UCXWorker",),
    "tag_probe": (f"{_UCXX}.UCXWorker",),
    "tag_recv": (f"{_UCXX}.UCXWorker", f"{_UCXX}.UCXEndpoint"),
    "tag_send": (f"{_UCXX}.UCXEndpoint",),
    # dask-cuda's plugin
    "async_alloc": ("dask_cuda.plugins.RMMSetup()",),
    "initial_pool_size": ("dask_cuda.plugins.RMMSetup()",),
    "managed_memory": ("dask_cuda.plugins.RMMSetup()",),
    "maximum_pool_size": ("dask_cuda.plugins.RMMSetup()",),
}
#: what classes of the libraries have, too, but is used here of others: strings, dictionaries, our own objects
SHARED = names_of("""
    __array_interface__ __cuda_array_interface__ __module__ __mro__ __name__ add append buffer cast codes copy count
    decode device discard get head info intersection is_unique isdigit items itemsize join keys kind lower name
    names nbytes nlevels partition pid pop read reason replace resource shape sort split stack startswith state
    strip sum tail to_host to_numpy total update used values view where
""")
#: attributes of what a driver gives: properties, memory, infos; no class of them can be looked at without a driver
OF_A_DRIVER = names_of("""
    busId cuDeviceGetCount cuDevicePrimaryCtxGetState gpu integrated name pid total used usedGpuMemory
""")
#: of a Worker; of what UCX and RMM give as plain tuples or data classes; of torch, which brings no stub here
OF_OTHERS = names_of("""
    allows_duplicate_labels annotate contiguous current_bytes data_ptr element_size from_address is_cuda
    is_quantized layout length matched memory_limit memory_manager memory_spill_fraction memory_target_fraction
    numel peak_bytes requires_grad resolve_conj resolve_neg strided untyped_storage
""")
#: looked at for names that escape
CLASSES = (
    *(
        "cudf.DataFrame",
        "cudf.Series",
        "cudf.Index",
        "cudf.CategoricalDtype",
        "cupy.ndarray",
        "cupy.cuda.MemoryPointer",
    ),
    *("pylibcudf.Table", "pylibcudf.Column", "pylibcudf.DataType", "pylibcudf.gpumemoryview", "rmm.DeviceBuffer"),
    *("pylibcudf.contiguous_split.PackedColumns", "pylibcudf.contiguous_split.ChunkedPack"),
    *(f"{_RMM}.{name}ResourceAdaptor" for name in ("Limiting", "Statistics", "FailureCallback")),
    *(f"{_RMM}.PoolMemoryResource", "rmm.pylibrmm.stream.Stream", "kvikio.CuFile"),
    *(f"{_UCXX}.UCX{name}" for name in ("Address", "Endpoint", "Worker", "Context")),
)
BUILTINS = (
    Path,
    str,
    bytes,
    bytearray,
    list,
    tuple,
    dict,
    set,
    frozenset,
    memoryview,
    type,
    types.ModuleType,
    int,
    np.ndarray,
)

SOURCES = {path: Source(path) for path in [*BACKENDS, *ON_A_GPU]}


def here(path: Path) -> str:
    return str(path.relative_to(ROOT))


def looked_up(path: str) -> Any:
    """What a path names; skipped where the library is not installed."""
    try:
        if path.endswith("()"):
            kind = found(path[:-2])
            return kind(*[None] * len(signature_of(kind).parameters))
        return found(path)
    except Absent as e:
        pytest.skip(str(e))


def libraries_of(source: Source) -> list[str]:
    return sorted({path.partition(".")[0] for path in source.imported()})


CASES = [
    pytest.param(source, library, id=f"{here(path)}-{library}")
    for path, source in SOURCES.items()
    for library in libraries_of(source)
]


@pytest.mark.parametrize(("source", "library"), CASES)
def test_what_is_reached_by_an_import(source: Source, library: str) -> None:
    """Imports, names and calls, each with its arguments."""
    wrong = []
    paths = [(0, path) for path in source.imported()] + list(source.named())
    for line, path in paths:
        if path.partition(".")[0] == library:
            try:
                looked_up(path)
            except AttributeError as e:
                wrong.append(f"line {line}: {e}")
    for node, path in source.calls():
        if path.partition(".")[0] == library:
            try:
                takes(looked_up(path), node)
            except (TypeError, ValueError) as e:
                wrong.append(f"line {node.lineno}: {path}: {e}")
    assert not wrong


@pytest.mark.parametrize("path", BACKENDS, ids=here)
def test_what_is_called_on_objects(path: Path) -> None:
    """A call must be taken by one of the classes that have the name; a name that is read must be there."""
    wrong = []
    for attribute, call in SOURCES[path].on_objects():
        owners = METHODS.get(attribute.attr)
        if owners is None:
            continue
        problems = []
        for owner in map(looked_up, owners):
            try:
                if call is None:
                    getattr(owner, attribute.attr)
                elif isinstance(getattr(type(owner), attribute.attr, None), property):
                    raise TypeError("it is a property")
                else:
                    method_takes(owner, attribute.attr, call)
            except (AttributeError, TypeError, ValueError) as e:
                problems.append(f"{owner}: {e}")
        if len(problems) == len(owners) and attribute.attr not in SHARED:
            wrong.append(f"line {attribute.lineno}: {attribute.attr}: {problems}")
    assert not wrong


@functools.cache
def ours() -> frozenset[str]:
    """Names that this package gives to functions, classes, fields and attributes."""
    names: set[str] = set()
    for path in (ROOT / "dask_gpurt").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {t.id for t in targets if isinstance(t, ast.Name)}
    return frozenset(names)


@pytest.mark.parametrize("path", BACKENDS, ids=here)
def test_nothing_escapes(path: Path) -> None:
    escaped: dict[str, list[str]] = collections.defaultdict(list)
    plain = {name for kind in BUILTINS for name in dir(kind)}
    for attribute, _ in SOURCES[path].on_objects():
        name = attribute.attr
        if name in METHODS or name in SHARED or name in OF_A_DRIVER or name in OF_OTHERS:
            continue
        if of := [owner for owner in CLASSES if hasattr(looked_up(owner), name)]:
            escaped[f"{name}, line {attribute.lineno}"] = of
        elif name not in plain and name not in ours() and not name.startswith("nvml") and name != "NVMLError":
            escaped[f"{name}, line {attribute.lineno}"] = ["of what it is is not known"]
    assert not escaped, "put it into METHODS, or into SHARED where it is not called on an object of these"


def test_private_names_of_cudf_are_those_of_the_table() -> None:
    from dask_gpurt.backends import cudf_values

    for place, owner, name in cudf_values.PRIVATE:
        assert hasattr(getattr(looked_up(place), owner), name)
    used = set()
    for name in ("cudf_values.py", "cudf_frames.py"):
        source = SOURCES[ROOT / "dask_gpurt" / "backends" / name]
        of_libraries = {path.rpartition(".")[2] for _, path in source.named()}
        used |= {name for name in of_libraries | {a.attr for a, _ in source.on_objects()} if name.startswith("_")}
    assert used == {name for _, _, name in cudf_values.PRIVATE if name.startswith("_")}


# ---- the check itself


def call(text: str) -> ast.Call:
    (node,) = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)]
    return node


class Stream:
    """Stream(obj=None, *, flags: dict[str, int] = None)"""

    def wait(self, event: object, *, flags: int = 0) -> None: ...


def test_a_wrong_argument_is_noticed() -> None:
    takes(Stream.wait, call("wait(event)"), bound=False)
    method_takes(Stream, "wait", call("stream.wait(event, flags=1)"))
    for bad in ("stream.wait()", "stream.wait(a, b)", "stream.wait(event, flag=1)"):
        with pytest.raises(TypeError):
            method_takes(Stream, "wait", call(bad))
    with pytest.raises(AttributeError):
        method_takes(Stream, "synchronise", call("stream.synchronise()"))


def test_signatures_come_from_docstrings_of_what_is_compiled() -> None:
    known = calls._by_docstring(Stream)
    assert str(known) == "(obj=None, *, flags=None)"
    assert calls._signature(["DeviceMemoryResource upstream_mr", "size_t size=0", "*args"]) is not None


def test_imports_are_found_wherever_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "import sys\nimport numpy\ndef f():\n    import rmm.mr as mr\n    from cudf import Index as I\n"
        "    df = sys.modules['cudf']\n    mr.Pool(1)\n    I.make(2)\n    df.Frame(3).seen(4)\n    numpy.empty(5)\n"
    )
    source = Source(file)
    assert [path for _, path in source.calls()] == ["rmm.mr.Pool", "cudf.Index.make", "cudf.Frame"]
    assert [a.attr for a, _ in source.on_objects()] == ["seen"]
    assert source.imported() == ["cudf", "cudf.Index", "rmm.mr"]
