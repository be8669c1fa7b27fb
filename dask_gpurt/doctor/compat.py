"""`untested`: which of the installed versions this release was not tested with (``compat.yaml``).

A version outside the sets is no error: `setup.cfg` bounds what can be installed, and each part looks for the private
names that it relies on. It is worth a line at the start, and in a report of a problem.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from dask_gpurt.backends.system import versions
from dask_gpurt.config_schema import load
from dask_gpurt.doctor.check import Check
from dask_gpurt.doctor.finding import ok, warn
from dask_gpurt.doctor.gpus import visible

if TYPE_CHECKING:
    import logging
    from collections.abc import Iterator, Mapping

    from dask_gpurt.doctor.check import Node
    from dask_gpurt.doctor.finding import Verdict


@functools.cache
def table() -> dict[str, list[dict[str, Any]]]:
    """The tested sets, by class."""
    return load("doctor/compat.yaml")


def untested(of: str, installed: Mapping[str, str]) -> list[str]:
    """What is outside of the set that is nearest, such as ``"pandas 4.0.0 (tested: 3.1)"``; empty: all was tested.

    Parameters
    ----------
    of
        ``cpu``, ``cuda`` or ``rocm``.
    installed
        As of `dask_gpurt.backends.system.versions`.
    """
    sets = table()[of]
    if not sets:
        return [f"any node of class {of}"]
    have = {re.sub(r"-cu\d+$", "", name): version for name, version in installed.items()}
    return min((list(_outside(tested, have)) for tested in sets), key=len)


def _outside(tested: Mapping[str, Any], have: Mapping[str, str]) -> Iterator[str]:
    for name, allowed in tested.items():
        version = have.get(name)
        if name == "note" or version is None:
            continue
        if not any(f"{version}.".startswith(f"{prefix}.") for prefix in allowed):
            yield f"{name} {version} (tested: {', '.join(allowed)})"


@functools.cache
def warn_once(logger: logging.Logger, of: str) -> None:
    """Name what is untested, once per process, and nothing where all was tested. Never raises: it is only a line."""
    try:
        outside = untested(of, versions())
    except Exception as e:  # of a damaged installation
        logger.warning("dask-gpurt: which versions were tested is not known: %r", e)
        return
    if outside:
        logger.warning("dask-gpurt: untested here: %s. `dask gpurt doctor` says more", "; ".join(outside))


def _look(node: Node) -> Iterator[Verdict]:
    of = "cuda" if visible(node.environ, node.gpu.look()) else "cpu"
    outside = untested(of, versions())
    if outside:
        yield warn(
            f"untested: {'; '.join(outside)}",
            expected="versions of compat.yaml",
            meaning="It may work; parts that do not fit refuse to start, and what they do not see is not known",
            remedy="these versions, or the whole test suite on this node (bash ci/test.sh)",
        )
    else:
        yield ok(f"this stack was tested as a whole (class {of})")


CHECK = Check(
    id="compat",
    name="Tested stack",
    looks_at="installed versions against the sets that were tested together",
    fails_when="warn: a version outside of the nearest set",
    remedy="a version of the set",
    look=_look,
    once_per_host=True,
)
