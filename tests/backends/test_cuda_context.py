"""`cuda.has_context` against a library that answers as the driver does; it is compiled here and is no driver."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

COMPILER = shutil.which("cc") or shutil.which("gcc")

DRIVER = """
static int initialized, contexts;
void begin(void) { initialized = 1; }
void use(int device) { contexts |= 1 << device; }
int cuDeviceGetCount(int *count) { if (!initialized) return 3; *count = 2; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    if (!initialized) return 3;
    *flags = 0; *active = contexts >> device & 1; return 0;
}
"""

LOOK = """
import ctypes, sys
from dask_gpurt.backends import cuda
seen = [cuda.has_context()]
driver = ctypes.CDLL(sys.argv[1])
seen.append(cuda.has_context())
driver.begin()
seen.append(cuda.has_context())
driver.use(1)
seen.append(cuda.has_context())
print(seen)
"""


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
def test_a_context_is_seen_and_none_is_made(tmp_path: Path) -> None:
    """Not before the library is loaded, initialized, and computes on some device."""
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(DRIVER)
    assert COMPILER is not None
    subprocess.run([COMPILER, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
    done = subprocess.run([sys.executable, "-c", LOOK, str(library)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[False, False, False, True]"


def test_an_older_driver_without_these_calls_has_none(tmp_path: Path) -> None:
    if COMPILER is None:
        pytest.skip("there is no C compiler")
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text("int other;\nvoid begin(void) {}\nvoid use(int device) {}\n")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
    done = subprocess.run([sys.executable, "-c", LOOK, str(library)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[False, False, False, False]"
