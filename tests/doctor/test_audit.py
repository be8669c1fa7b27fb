"""T9: extensions that were really compiled, with and without their library; vendors; requirements."""

from __future__ import annotations

import importlib.machinery
import json
import shutil
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from click.testing import CliRunner

from dask_gpurt.cli import gpurt
from dask_gpurt.doctor import elf, installed
from dask_gpurt.doctor.audit import CHECK, audit
from dask_gpurt.doctor.finding import State

from .trees import Tree, node, told

SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
_EXTENSION = """
#include <Python.h>
#include <dlfcn.h>
int inner(void);
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "thing", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_thing(void) {
    dlopen("libcudart.so.13", RTLD_LAZY);
    return inner() ? PyModule_Create(&module) : NULL;
}
"""


def distribution(site: Path, name: str, files: tuple[str, ...] = (), requires: tuple[str, ...] = ()) -> None:
    """What pip leaves behind."""
    folder = site / f"{name.replace('-', '_')}-1.0.dist-info"
    folder.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {r}" for r in requires)]
    lines += [f"Provides-Extra: {r.split(chr(34))[1]}" for r in requires if "extra ==" in r]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    (folder / "RECORD").write_text("".join(f"{file},,\n" for file in files))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A distribution `thing`: an extension that needs libouter.so, which needs libinner.so."""
    cc = shutil.which("cc")
    include = sysconfig.get_path("include")
    if cc is None or not (include and Path(include, "Python.h").exists()):
        pytest.skip("a C compiler and Python's headers are needed")
    site = tmp_path / "site"
    (site / "thing.libs").mkdir(parents=True)
    (tmp_path / "inner.c").write_text("int inner(void) { return 1; }\n")
    (tmp_path / "outer.c").write_text("int inner(void); int outer(void) { return inner(); }\n")
    (tmp_path / "thing.c").write_text(_EXTENSION)
    libraries = site / "thing.libs"
    link = [f"-L{libraries}", "-Wl,--no-as-needed"]
    for command in (
        ["-o", f"{libraries}/libgpurtinner.so.1", "-Wl,-soname,libgpurtinner.so.1", "inner.c"],
        ["-o", f"{libraries}/libgpurtouter.so", "-Wl,-rpath,$ORIGIN", "outer.c", *link, "-l:libgpurtinner.so.1"],
        [
            *("-o", f"{site}/thing{SUFFIX}", f"-I{include}", "-Wl,-rpath,$ORIGIN/thing.libs", "thing.c"),
            *(*link, "-lgpurtouter", "-l:libgpurtinner.so.1"),
        ],
    ):
        subprocess.run([cc, "-shared", "-fPIC", *command], cwd=tmp_path, check=True)
    distribution(site, "thing", (f"thing{SUFFIX}", "thing.libs/libgpurtouter.so", "thing.libs/libgpurtinner.so.1"))
    return site


def can_import(site: Path) -> bool:
    return subprocess.run([sys.executable, "-c", "import thing"], cwd=site, capture_output=True).returncode == 0


def test_the_dynamic_section(site: Path) -> None:
    got = elf.read(str(site / f"thing{SUFFIX}"))
    assert got is not None
    assert {"libgpurtouter.so", "libgpurtinner.so.1"} <= set(got.needed)
    assert got.is_extension
    assert got.search == (f"{site}/thing.libs",)
    assert "libcudart.so.13" in got.opened
    inner = elf.read(str(site / "thing.libs" / "libgpurtinner.so.1"))
    assert inner is not None
    assert (inner.soname, inner.is_extension, inner.opened) == ("libgpurtinner.so.1", False, frozenset())


@pytest.mark.parametrize("lost", ["libgpurtinner.so.1", "libgpurtouter.so"])
def test_an_extension_misses_a_library_exactly_when_it_cannot_be_imported(site: Path, lost: str) -> None:
    assert can_import(site)
    assert not [v for v in audit(path=[str(site)]) if v.state is State.FAIL]
    (site / "thing.libs" / lost).unlink()
    assert not can_import(site)
    (found,) = [v for v in audit(path=[str(site)]) if v.state is State.FAIL]
    assert found.found.startswith(f"thing: thing{SUFFIX} cannot be imported without {lost}")
    assert found.remedy.startswith("install thing again (pip install --force-reinstall thing)")


def test_a_library_that_another_distribution_ships(site: Path, tmp_path: Path) -> None:
    """Such as libucxx's, which its package opens before the extension is imported."""
    other = tmp_path / "other"
    other.mkdir()
    (site / "thing.libs" / "libgpurtinner.so.1").rename(other / "libgpurtinner.so.1")
    distribution(other, "libinner", ("libgpurtinner.so.1",))
    assert [v for v in audit(path=[str(site)]) if v.state is State.FAIL]
    assert not [v for v in audit(path=[str(site), str(other)]) if v.state is State.FAIL]


def test_an_image_without_a_cache_of_the_loader(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "_CACHE", "/nothing")
    assert not [v.found for v in audit(path=[str(site)]) if v.state is State.FAIL]


def test_who_brings_cuda_and_rocm(tmp_path: Path) -> None:
    distribution(tmp_path, "dask-gpurt", requires=('ucxx-cu13; extra == "ucx"',))
    distribution(tmp_path, "ucxx-cu13", requires=("libucxx-cu13",))
    distribution(tmp_path, "libucxx-cu13")
    distribution(tmp_path, "nvidia-ml-py")
    path = [str(tmp_path)]
    (found,) = [v for v in audit("cpu", path) if v.state is State.FAIL]
    assert found.found == "2 distributions for CUDA (0 MB): libucxx-cu13, ucxx-cu13; asked for by dask-gpurt[ucx]"
    assert "the extra ucx of dask-gpurt brings them" in found.meaning
    assert found.remedy.startswith("pip uninstall libucxx-cu13 ucxx-cu13, ")
    assert [v for v in audit("rocm", path) if v.state is State.FAIL]
    for backend in (None, "cuda"):
        assert not [v for v in audit(backend, path) if v.state is not State.OK]


def test_a_library_of_cuda_in_any_distribution(site: Path) -> None:
    """It is known by what it needs, whatever its name."""
    (site / "thing.libs" / "libgpurtinner.so.1").rename(site / "thing.libs" / "x")
    library = site / f"thing{SUFFIX}"
    library.write_bytes(library.read_bytes().replace(b"libgpurtinner.so.1\0", b"libcuda.so.1\0".ljust(19, b"\0")))
    outer = site / "thing.libs" / "libgpurtouter.so"
    outer.write_bytes(outer.read_bytes().replace(b"libgpurtinner.so.1\0", b"libcuda.so.1\0".ljust(19, b"\0")))
    (found,) = [v for v in audit(None, [str(site)]) if v.state is State.WARN]
    assert "cannot be imported without libcuda.so.1" in found.found
    assert found.remedy.startswith("the driver of the GPU")
    states = [v.found for v in audit("cpu", [str(site)]) if v.state is State.FAIL]
    assert any(text.startswith("1 distributions for CUDA") and "thing" in text for text in states)


@pytest.mark.parametrize(
    ("kind", "environ", "state"),
    [
        ("0x030200", {"NVIDIA_VISIBLE_DEVICES": "all"}, State.FAIL),
        ("0x030200", {"CUDA_VISIBLE_DEVICES": ""}, State.WARN),
        ("0x030200", {"NVIDIA_VISIBLE_DEVICES": "void"}, State.WARN),
        ("0x0c0330", {"NVIDIA_VISIBLE_DEVICES": "all"}, State.WARN),  # a port for USB
    ],
)
def test_the_driver_is_missed_where_a_gpu_is_to_be_used(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, environ: dict[str, str], state: State
) -> None:
    outer = site / "thing.libs" / "libgpurtouter.so"
    outer.write_bytes(outer.read_bytes().replace(b"libgpurtinner.so.1\0", b"libcuda.so.1\0".ljust(19, b"\0")))
    monkeypatch.setattr(sys, "path", [str(site)])
    pci = {"sys/bus/pci/devices/x/vendor": "0x10de", "sys/bus/pci/devices/x/class": kind}
    (found,) = told(CHECK, node(Tree(tmp_path / "tree", pci), environ=environ), state)
    assert "cannot be imported without libcuda.so.1, which libgpurtouter.so needs" in found.found


def test_requirements_that_are_not_met(tmp_path: Path) -> None:
    distribution(tmp_path, "first", requires=("second>=2", "third", 'fourth; extra == "x"', 'win; os_name == "nt"'))
    distribution(tmp_path, "second")
    found = {v.found: v.remedy for v in audit(path=[str(tmp_path)]) if v.state is State.WARN}
    assert found == {
        "first requires second>=2, and 1.0 is installed": 'pip install "second>=2"',
        "first requires third, which is not installed": 'pip install "third"',
    }


def test_files_that_are_no_shared_objects(tmp_path: Path) -> None:
    head = b"\x7fELF\x02\x01" + bytes(26)

    def dynamic(section: bytes) -> bytes:
        """With a dynamic section, and no other part."""
        header = struct.pack("<IIQQQQQQ", 2, 0, 120, 120, 0, len(section), len(section), 8)
        return head + struct.pack("<QQ", 64, 0) + bytes(6) + struct.pack("<HH", 56, 1) + bytes(6) + header + section

    broken = {
        "empty.so": b"",
        "text.so": b"INPUT(libx.so)",
        "narrow.so": b"\x7fELF\x01\x01" + bytes(100),
        "cut.so": head,
        "debug.so": dynamic(b""),  # as objcopy --only-keep-debug makes it
        "nowhere.so": dynamic(struct.pack("<QQQQ", 5, 1 << 20, 10, 8)),  # its strings are in no part that is loaded
        "far.so": head + struct.pack("<QQ", 1 << 40, 0) + bytes(6) + struct.pack("<HH", 56, 3) + bytes(4),
    }
    for name, data in broken.items():
        (tmp_path / name).write_bytes(data)
        assert elf.read(str(tmp_path / name)) is None, name
    distribution(tmp_path, "odd", (*broken, "gone.so"))
    assert [v.state for v in audit(path=[str(tmp_path)])] == [State.OK]


def test_the_environment_that_tests_run_in() -> None:
    """The step of continuous integration: whatever is installed here can be imported."""
    got = CliRunner().invoke(gpurt, ["audit", "--json"])
    assert got.exception is None or isinstance(got.exception, SystemExit)
    found = json.loads(got.output)["checks"]
    assert not [f["found"] for f in found if f["state"] == "fail"]
    assert got.exit_code in (0, 1)
    with_cuda = CliRunner().invoke(gpurt, ["audit", "--backend", "rocm"])
    assert (with_cuda.exit_code == 2) == ("for CUDA" in with_cuda.output)
