"""Every name and signature of RAPIDS that `dask_gpurt.backends` calls is there, in the wheels that are installed.

Needs no GPU. Skipped by library where that cannot be imported. What is compiled has no signature at run time: there the
stubs that the wheels bring are read.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

#: module, name, positional arguments, keywords; of classes their constructor
PYTHON_CALLS = [
    ("rmm.allocators.cupy", "rmm_cupy_allocator", 1, ()),
    ("cudf", "RangeIndex", 3, ("name",)),
    ("cudf", "CategoricalDtype", 1, ("ordered",)),
    ("cudf", "get_option", 1, ()),
    ("cudf", "DataFrame._from_data", 1, ("index", "columns")),
    ("cudf", "Series._from_column", 1, ("name", "index")),
    ("cudf", "Index._from_column", 1, ("name",)),
    ("cudf.core.column", "ColumnBase.create", 2, ()),
    ("cudf", "DataFrame.to_pylibcudf", 1, ()),
    ("cudf", "Series.to_pylibcudf", 1, ()),
    ("cudf", "Index.to_pylibcudf", 1, ()),
]
#: module with a stub, class or "", function, positional arguments without self, keywords
STUB_CALLS = [
    ("rmm.pylibrmm.device_buffer", "DeviceBuffer", "__init__", 0, ("size", "mr")),
    ("rmm.pylibrmm.stream", "Stream", "__init__", 0, ("flags",)),
    ("rmm.pylibrmm.stream", "Stream", "__cuda_stream__", 0, ()),
    ("rmm.pylibrmm.stream", "Stream", "synchronize", 0, ()),
    *(
        ("rmm.pylibrmm.memory_resource._memory_resource", *rest)
        for rest in [
            ("DeviceMemoryResource", "allocate", 1, ()),
            ("DeviceMemoryResource", "deallocate", 2, ()),
            ("UpstreamResourceAdaptor", "get_upstream", 0, ()),
            ("CudaAsyncMemoryResource", "__init__", 0, ("release_threshold",)),
            ("PoolMemoryResource", "__init__", 1, ("initial_pool_size", "maximum_pool_size")),
            ("PoolMemoryResource", "pool_size", 0, ()),
            ("LimitingResourceAdaptor", "__init__", 2, ()),
            ("LimitingResourceAdaptor", "get_allocated_bytes", 0, ()),
            ("LimitingResourceAdaptor", "get_allocation_limit", 0, ()),
            ("StatisticsResourceAdaptor", "__init__", 1, ()),
            ("StatisticsResourceAdaptor", "allocation_counts", 0, ()),
            ("FailureCallbackResourceAdaptor", "__init__", 2, ()),
            ("PinnedHostMemoryResource", "__init__", 0, ()),
            ("", "get_per_device_resource", 1, ()),
            ("", "set_per_device_resource", 2, ()),
        ]
    ),
    ("pylibcudf.contiguous_split", "ChunkedPack", "create", 4, ()),
    ("pylibcudf.contiguous_split", "ChunkedPack", "has_next", 0, ()),
    ("pylibcudf.contiguous_split", "ChunkedPack", "next", 1, ()),
    ("pylibcudf.contiguous_split", "ChunkedPack", "get_total_contiguous_size", 0, ()),
    ("pylibcudf.contiguous_split", "ChunkedPack", "build_metadata", 0, ()),
    ("pylibcudf.contiguous_split", "", "unpack_from_memoryviews", 2, ()),
    ("pylibcudf.gpumemoryview", "gpumemoryview", "__init__", 1, ()),
    ("pylibcudf.table", "Table", "__init__", 1, ()),
    ("pylibcudf.table", "Table", "columns", 0, ()),
    ("pylibcudf.column", "Column", "__init__", 7, ("validate",)),
    *(
        ("pylibcudf.column", "Column", name, 0, ())
        for name in ("type", "size", "null_count", "offset", "data", "null_mask", "children", "num_children")
    ),
    ("pylibcudf.column", "Column", "child", 1, ()),
    ("pylibcudf.traits", "", "is_fixed_width", 1, ()),
    ("pylibcudf.types", "", "size_of", 1, ()),
    ("pylibcudf.types", "DataType", "id", 0, ()),
]
#: of ``cuda.bindings``, which has no signatures at all
CUDA_NAMES = {
    "runtime": (
        *("cudaGetDevice", "cudaGetDeviceProperties", "cudaMemGetInfo", "cudaDeviceSynchronize", "cudaMemcpyAsync"),
        *("cudaMemcpyKind", "cudaSetDevice", "cudaFree", "cudaEventCreateWithFlags", "cudaEventRecord"),
        *("cudaStreamWaitEvent", "cudaEventSynchronize", "cudaEventDestroy", "cudaEventBlockingSync"),
        "cudaEventDisableTiming",
    ),
    "driver": ("cuDeviceGet", "cuDevicePrimaryCtxGetState"),
}


def module(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name.partition('.')[0]} is not installed", exc_type=ImportError)


@pytest.mark.parametrize(
    ("place", "name", "n", "keywords"), PYTHON_CALLS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_of_python(place: str, name: str, n: int, keywords: tuple[str, ...]) -> None:
    found = module(place)
    for part in name.split("."):
        found = getattr(found, part)
    inspect.signature(found).bind(*range(n), **dict.fromkeys(keywords))


def stub_of(name: str) -> ast.Module:
    found = module(name)
    path = Path(str(found.__file__))
    return ast.parse((path.parent / f"{path.name.partition('.')[0]}.pyi").read_text())


@pytest.mark.parametrize(
    ("place", "owner", "name", "n", "keywords"), STUB_CALLS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_of_what_is_compiled(place: str, owner: str, name: str, n: int, keywords: tuple[str, ...]) -> None:
    tree = stub_of(place)
    body = tree.body
    if owner:
        (cls,) = [node for node in body if isinstance(node, ast.ClassDef) and node.name == owner]
        body = cls.body
        assert hasattr(module(place), owner)
    # Of overloads and properties any; a class without a constructor in its stub has that of its base.
    functions = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert functions, f"{owner}.{name} is not in the stub of {place}"
    assert any(_takes(f, n, keywords, bound=bool(owner)) for f in functions)


def _takes(function: ast.FunctionDef, n: int, keywords: tuple[str, ...], *, bound: bool) -> bool:
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list)
    args = function.args
    positional = [a.arg for a in (*args.posonlyargs, *args.args)][1 if bound and not static else 0 :]
    required = positional[: len(positional) - len(args.defaults)]
    by_name = {*positional[n:], *(a.arg for a in args.kwonlyargs)}
    needed = {a.arg for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if d is None}
    return len(positional) >= n and set(keywords) <= by_name and needed | set(required[n:]) <= set(keywords)


@pytest.mark.parametrize("place", CUDA_NAMES)
def test_of_cuda(place: str) -> None:
    found = module(f"cuda.bindings.{place}")
    assert [name for name in CUDA_NAMES[place] if not hasattr(found, name)] == []


def test_private_names_of_cudf_are_those_of_the_table() -> None:
    from dask_gpurt.backends import cudf_values

    for place, owner, name in cudf_values.PRIVATE:
        assert hasattr(getattr(module(place), owner), name)
    source = ast.parse(inspect.getsource(cudf_values))
    used = {
        node.attr
        for node in ast.walk(source)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    }
    assert used == {name for _, _, name in cudf_values.PRIVATE if name.startswith("_")}


def test_a_missing_argument_is_noticed() -> None:
    (function,) = ast.parse("def f(self, a, b=1, *, c, d=2): ...").body
    assert isinstance(function, ast.FunctionDef)
    assert _takes(function, 1, ("c",), bound=True)
    assert _takes(function, 2, ("c", "d"), bound=True)
    assert not _takes(function, 0, ("c",), bound=True)
    assert not _takes(function, 1, (), bound=True)
    assert not _takes(function, 1, ("c", "e"), bound=True)
    assert not _takes(function, 3, ("c",), bound=True)
