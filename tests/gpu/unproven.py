"""Which lines of `dask_gpurt.backends` only a GPU can prove: a list, made by running everything else.

    python -m tests.gpu.unproven           compare with `unproven.txt`; exit 1 where they differ
    python -m tests.gpu.unproven --write   write it again

A *line* is a statement that calls a GPU's library (`calls`). It is proven where a test that needs no GPU has run it to
its end: with RMM over host memory, with cuDF's own columns there, with UCX over shared memory, with the calls of the
driver replaced (`tests.backends.host_driver`). One that only ever raised is not. Needs Python 3.12 and the libraries
(``ci/gpu/dry.sh``), and takes a minute. `test_unproven.py` holds the list against the sources at all times.
"""

from __future__ import annotations

import ast
import collections
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.gpu.calls import Source

if TYPE_CHECKING:
    from types import CodeType

ROOT = Path(__file__).parents[2]
BACKENDS = ROOT / "dask_gpurt" / "backends"
LIST = Path(__file__).with_name("unproven.txt")
#: those that compute with a GPU; NVML is asked by others and has its recordings (`tests/doctor`)
FILES = ("cuda", "cudf_frames", "cudf_values", "device_copies", "device_values", "rmm_stack", "ucx_device")
#: what runs them without a GPU
TESTS = ("tests/gpu", "tests/backends", "tests/tiers/device", "tests/shuffle/transport/test_ucx_device.py")
#: called on objects of the libraries; `test_names.METHODS` says of which
_CALLED_NAMES = """
    __cuda_stream__ allocate astype build_metadata columns contiguous data_ptr deallocate get_allocated_bytes
    get_total_contiguous_size get_upstream has_next next num_rows pool_size release synchronize to_arrow
    to_pylibcudf untyped_storage
"""
_CALLED = frozenset(_CALLED_NAMES.split())


def statements(path: Path) -> dict[int, tuple[int, str]]:
    """First line -> (last line, text) of the innermost statements that call a library."""
    source, text = Source(path), path.read_text()
    lines = {node.lineno for node, _ in source.calls()}
    lines |= {a.lineno for a, call in source.on_objects() if call is not None and a.attr in _CALLED}
    out = {}
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.stmt) or isinstance(
            node, (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
        ):
            continue
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else node.end_lineno or node.lineno  # of `with`, `for`, `if`: the head
        if any(node.lineno <= line <= last for line in lines):
            words = " ".join(" ".join(text.splitlines()[node.lineno - 1 : last]).split())
            out[node.lineno] = last, words
    return out


def run_all() -> dict[str, set[int]]:
    """File -> lines that were run to their end, by tests that need no GPU."""
    tool, events = sys.monitoring.COVERAGE_ID, sys.monitoring.events
    began: dict[CodeType, int] = {}
    done: dict[str, set[int]] = collections.defaultdict(set)
    wanted = {str(BACKENDS / f"{name}.py") for name in FILES}

    # A line is done when the next of its function begins, or the function returns; not when it raises.
    def line(code: CodeType, number: int) -> Any:
        if code.co_filename not in wanted:
            return sys.monitoring.DISABLE
        if code in began:
            done[code.co_filename].add(began[code])
        began[code] = number
        return None

    def returned(code: CodeType, offset: int, value: object) -> Any:
        if code.co_filename not in wanted:
            return sys.monitoring.DISABLE
        if code in began:
            done[code.co_filename].add(began.pop(code))
        return None

    def raised(code: CodeType, offset: int, error: BaseException) -> None:
        if code.co_filename in wanted:
            began.pop(code, None)

    sys.monitoring.use_tool_id(tool, "unproven")
    sys.monitoring.register_callback(tool, events.LINE, line)
    sys.monitoring.register_callback(tool, events.PY_RETURN, returned)
    sys.monitoring.register_callback(tool, events.RAISE, raised)
    sys.monitoring.set_events(tool, events.LINE | events.PY_RETURN | events.RAISE)
    status = pytest.main(
        [
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not gpu and not cluster",
            "--ignore",
            str(LIST.with_name("test_unproven.py")),
            "--ignore",
            "tests/backends/test_tensors.py",  # of a torch that is made up
            *TESTS,
        ]
    )
    sys.monitoring.set_events(tool, 0)
    sys.monitoring.free_tool_id(tool)
    if status != 0:
        sys.exit(f"the tests failed ({status}): what they prove is not known")
    return {Path(name).stem: lines for name, lines in done.items()}


def find() -> list[str]:
    """``file: statement`` of each that was not proven."""
    done = run_all()
    out = []
    for name in FILES:
        for first, (last, words) in sorted(statements(BACKENDS / f"{name}.py").items()):
            if not done.get(name, set()).intersection(range(first, last + 1)):
                out.append(f"{name}: {words}")
    return out


def main() -> int:
    found = find()
    if "--write" in sys.argv:
        LIST.write_text("\n".join(found) + "\n")
    known = LIST.read_text().splitlines() if LIST.exists() else []
    for word in sorted(set(found) ^ set(known)):
        sys.stdout.write(f"{'new, not proven' if word in found else 'proven now'}: {word}\n")
    sys.stdout.write(f"{len(found)} lines are left to a GPU\n")
    return int(found != known)


if __name__ == "__main__":
    sys.exit(main())
