"""T9 and `dask gpurt audit`: whether what is installed can be loaded, fits together, and is what the backend needs."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from dask_gpurt.doctor.check import Check
from dask_gpurt.doctor.finding import Finding, fail, findings_of, ok, warn
from dask_gpurt.doctor.gpu import AMD, NVIDIA, pci_devices
from dask_gpurt.doctor.gpus import is_wanted
from dask_gpurt.doctor.installed import Installed, normal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dask_gpurt.doctor.check import Node
    from dask_gpurt.doctor.finding import Verdict

#: distributions that bring libraries of a vendor (nvidia-ml-py is Python only), and those libraries
_DISTRIBUTIONS = {
    "cuda": re.compile(r"(nvidia-(?!ml-py$).+|cuda-(?!python$|pathfinder$).+|cupy-cuda.+|.+-cu1\d)"),
    "rocm": re.compile(r"(rocm-.+|hip-.+|amdsmi|cupy-rocm.+|.+-rocm\d*)"),
}
_LIBRARIES = {
    "cuda": re.compile(r"lib(cuda|cudart|nvrtc|nvJitLink|cublas\w*|cufft\w*|cusolver\w*|cusparse|cudnn\w*|nccl)\.so.*"),
    "rocm": re.compile(r"lib(amdhip64|hsa-runtime64|rocblas|rccl|hipblas|MIOpen)\.so.*"),
}
#: from the driver, never from a wheel
_OF_DRIVER = {"libcuda.so.1", "libnvidia-ml.so.1"}
#: extensions that their package tries, and goes on without
_OPTIONAL = ("numba/np/ufunc/tbbpool", "numba/np/ufunc/omppool")


def audit(backend: str | None = None, path: Sequence[str] | None = None) -> list[Verdict]:
    """All that is wrong with the installed distributions, or that nothing is.

    Parameters
    ----------
    backend
        ``cpu``, ``cuda`` or ``rocm``: libraries of another one are an error. None: any are right.
    path
        Folders with distributions; None: `sys.path`.
    """
    installed = Installed(path)
    out = [*_missing(installed, backend), *_vendors(installed, backend), *_requirements(installed)]
    if installed.unreadable:
        out.append(
            warn(
                f"{len(installed.unreadable)} files cannot be read, such as {installed.unreadable[0]}",
                expected="files that this user may read",
                meaning="Nothing is known about them, and importing them fails for this user",
                remedy="their permissions, or a new environment",
            )
        )
    count = sum(map(len, installed.objects.values()))
    return [*out, ok(f"{count} shared objects of {len(installed.distributions)} distributions")]


def _missing(installed: Installed, backend: str | None) -> Iterator[Verdict]:
    """Extensions that cannot be imported, one line per distribution and library."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, objects in installed.objects.items():
        for o in objects:
            if o.is_extension and not any(part in o.path for part in _OPTIONAL):
                for library, needed_by in installed.missing(o).items():
                    found.setdefault((name, library), []).append((os.path.basename(o.path), needed_by))
    for (name, library), members in found.items():
        extension, needed_by = members[0]
        through = "" if needed_by == extension else f", which {needed_by} needs"
        of_driver = library in _OF_DRIVER
        yield (warn if of_driver and backend is None else fail)(
            f"{name}: {extension}"
            + (f" and {len(members) - 1} more" if len(members) > 1 else "")
            + f" cannot be imported without {library}{through}",
            expected="every library that an extension needs",
            meaning="ImportError where it is used, on this machine",
            remedy="the driver of the GPU, or a node that has one"
            if of_driver
            else f"install {name} again (pip install --force-reinstall {name}), or the system package with {library}",
        )


def _vendors(installed: Installed, backend: str | None) -> Iterator[Verdict]:
    """What is there for CUDA and ROCm, and why."""
    for vendor, pattern in _DISTRIBUTIONS.items():
        names = {name for name in installed.distributions if pattern.fullmatch(name)}
        for name, objects in installed.objects.items():
            needed = {library for o in objects for library in o.needed}
            if any(_LIBRARIES[vendor].fullmatch(library) for library in needed):
                names.add(name)
        if not names:
            continue
        nbytes = sum(map(installed.nbytes, names))
        outside = {who for name in names for who in installed.asked_for_by(name) if who.partition("[")[0] not in names}
        reason = f"asked for by {', '.join(sorted(outside))}" if outside else "which nothing asks for"
        text = f"{len(names)} distributions for {vendor.upper()} ({nbytes / 1e6:.0f} MB): {', '.join(sorted(names))}"
        if backend is None or backend == vendor:
            yield ok(f"{text}; {reason}")
        else:
            ucx = " UCX comes in wheels for CUDA only, so the extra ucx of dask-gpurt brings them" * any(
                who == "dask-gpurt[ucx]" for who in outside
            )
            yield fail(
                f"{text}; {reason}",
                expected=f"no libraries for {vendor.upper()} with the backend {backend}",
                meaning=f"The image is larger than it need be, and imports may look for a GPU.{ucx}",
                remedy=f"pip uninstall {' '.join(sorted(names))}, and leave out the extras that ask for them",
            )
    opened = {library: o.path for objects in installed.objects.values() for o in objects for library in o.opened}
    yield from _opened(opened)


def _opened(opened: dict[str, str]) -> Iterator[Verdict]:
    """Optional: they are looked for when they are used."""
    for vendor, pattern in _LIBRARIES.items():
        names = sorted(name for name in opened if pattern.fullmatch(name))
        if names:
            yield ok(f"{vendor.upper()} libraries that may be opened at run time: {', '.join(names)}")


def _requirements(installed: Installed) -> Iterator[Verdict]:
    """What is required and is missing, or has another version."""
    for name in installed.distributions:
        for r, extra in installed.requirements(name):
            there = installed.distributions.get(normal(r.name))
            if extra or (there is not None and r.specifier.contains(there.version, prereleases=True)):
                continue
            yield warn(
                f"{name} requires {r.name}{r.specifier}, "
                + ("which is not installed" if there is None else f"and {there.version} is installed"),
                expected="what each distribution requires",
                meaning="Parts of it may fail where they are used",
                remedy=f'pip install "{r.name}{r.specifier}"',
            )


def report(backend: str | None) -> list[Finding]:
    """What `dask gpurt audit` prints."""
    import time

    started = time.monotonic()
    verdicts = audit(backend)
    return findings_of(CHECK.id, CHECK.name, verdicts, time.monotonic() - started)


def _look(node: Node) -> Iterator[Verdict]:
    # Not for a worker that was given none of the GPUs that sysfs shows: it has no driver's library, and needs none.
    if pci_devices(node.system, NVIDIA):
        yield from audit("cuda" if is_wanted(node.environ, node.system) else None)
    else:
        yield from audit("rocm" if pci_devices(node.system, AMD) else None)


CHECK = Check(
    id="T9",
    name="Wheels",
    looks_at="libraries that installed shared objects need (DT_NEEDED), requirements met; `dask gpurt audit`",
    fails_when="fail: an extension that cannot be imported because a library is missing, libraries for CUDA or ROCm "
    "with another backend; warn: a requirement that is not met, a library of the driver where there is none",
    remedy="install the distribution again, or leave out the extra",
    look=_look,
    limit_seconds=8.0,
    once_per_host=True,
)
