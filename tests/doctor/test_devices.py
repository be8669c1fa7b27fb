"""T3 and T8: device files with rights that are really missing, and a libcuda that was compiled here."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from dask_gpurt.doctor.devices import CHECKS
from dask_gpurt.doctor.finding import State

from .trees import Tree, alone, node, told

if TYPE_CHECKING:
    from pathlib import Path

ROCM, CUDA = CHECKS
KFD = "sys/class/kfd/kfd/topology/nodes"
AMD = {
    f"{KFD}/0/properties": "cpu_cores_count 16\nsimd_count 0\n",
    f"{KFD}/1/properties": "cpu_cores_count 0\nsimd_count 304\ndrm_render_minor 128\n",
    "dev/kfd": "",
    "dev/dri/renderD128": "",
}
NVIDIA = {
    "sys/bus/pci/devices/0000:3b:00.0/vendor": "0x10de\n",
    "sys/bus/pci/devices/0000:3b:00.0/class": "0x030200\n",
    "dev/nvidiactl": "",
    "dev/nvidia-uvm": "",
    "dev/nvidia0": "",
}


def test_an_amd_gpu_that_can_be_opened(tmp_path: Path) -> None:
    tree = Tree(tmp_path, AMD)
    assert [v.found for v in ROCM.look(node(tree))] == ["1 AMD GPUs can be opened"]
    (tmp_path / "dev/kfd").unlink()
    (found,) = told(ROCM, node(tree), State.FAIL)
    assert found.found == "/dev/kfd: ENOENT No such file or directory"
    assert "amdgpu module" in found.remedy
    assert [v.state for v in ROCM.look(node(Tree(tmp_path / "none", {})))] == [State.NA]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_a_user_without_rights(tmp_path: Path) -> None:
    """The folder of a test is closed to others: nobody starts with it open."""
    root = tmp_path / "root"
    Tree(root, AMD)
    (root / "dev/dri/renderD128").chmod(0)
    code = f"""
    import os
    from dask_gpurt.doctor.devices import CHECKS
    from tests.doctor.trees import node
    from dask_gpurt.backends.system import System
    os.chdir({str(root)!r})
    os.chmod("dev/kfd", 0o666)
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    for v in CHECKS[0].look(node(System("."))):
        print(v.state, v.found, "|", v.remedy)
    """
    lines = alone(code).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("fail /dev/dri/renderD128: EACCES Permission denied | add this user to the groups")


def test_errors_of_amd_memory(tmp_path: Path) -> None:
    errors = {f"sys/class/drm/{name}/device/ras/umc_err_count": "ue: 2\nce: 40\n" for name in ("card0", "renderD128")}
    tree = Tree(tmp_path, {**AMD, **errors})
    (found,) = told(ROCM, node(tree), State.FAIL)
    assert found.found == "card0 had 2 memory errors that could not be corrected"


def libcuda(folder: Path, body: str) -> dict[str, str]:
    """The environment of a process that finds this libcuda."""
    cc = shutil.which("cc")
    if cc is None:
        pytest.skip("a C compiler is needed")
    folder.mkdir(exist_ok=True)
    (folder / "cuda.c").write_text(f"#include <unistd.h>\n#include <stdlib.h>\nint cuInit(unsigned f) {{ {body} }}\n")
    subprocess.run([cc, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "cuda.c"], check=True)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


@pytest.mark.parametrize(
    ("body", "text", "remedy"),
    [
        ("return 803;", "cuInit: 803 (libcuda is of another version than the kernel's driver)", "remove libcuda"),
        ("return 100;", "cuInit: 100 (no device)", "--gpus all"),
        ("return 999;", "cuInit: 999", "container toolkit"),
        ("abort();", "cuInit: ended by signal 6", "container toolkit"),
        ("sleep(60); return 0;", "cuInit: no answer within 0.5 s", "container toolkit"),
    ],
)
def test_a_libcuda_that_does_not_start(
    tmp_path: Path, body: str, text: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sleep" in body:
        monkeypatch.setattr("dask_gpurt.doctor.devices._SECONDS", 0.5)
    about = node(Tree(tmp_path / "root", NVIDIA), environ=libcuda(tmp_path / "lib", body))
    (found,) = told(CUDA, about, State.FAIL)
    assert found.found == text
    assert remedy in found.remedy


def test_a_libcuda_that_starts(tmp_path: Path) -> None:
    about = node(Tree(tmp_path / "root", NVIDIA), environ=libcuda(tmp_path / "lib", "return f;"))
    assert [v.found for v in CUDA.look(about)] == ["1 devices can be opened, cuInit succeeds"]


def test_a_container_without_the_toolkit(tmp_path: Path) -> None:
    files = {name: text for name, text in NVIDIA.items() if not name.startswith("dev/")}
    found = [v.found for v in told(CUDA, node(Tree(tmp_path, files), environ=dict(os.environ)), State.FAIL)]
    assert found[:3] == [f"/dev/{n}: ENOENT No such file or directory" for n in ("nvidiactl", "nvidia-uvm", "nvidia0")]
    assert found[3].startswith("cuInit: ")
    assert [v.state for v in CUDA.look(node(Tree(tmp_path / "none", {})))] == [State.NA]
