"""The checks as entry points of ``rapids doctor`` (group ``rapids_doctor_check``).

Each function takes ``verbose`` and whatever else it is given. It returns what was found, warns, or raises.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from dask_gpurt.doctor.check import run
from dask_gpurt.doctor.finding import State
from dask_gpurt.doctor.registry import CHECKS, here
from dask_gpurt.errors import GpurtError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dask_gpurt.doctor.check import Check
    from dask_gpurt.doctor.finding import Finding


def _entry(check: Check) -> Callable[..., str]:
    def look(verbose: bool = False, **kwargs: object) -> str:
        findings = run([check], here())
        failed = [f for f in findings if f.state is State.FAIL]
        if failed:
            raise GpurtError("; ".join(map(_line, failed)))
        for f in findings:
            if f.state is State.WARN:
                warnings.warn(_line(f), stacklevel=2)
        return "; ".join(f"{f.name}: {f.found} ({f.state}, {f.seconds:g} s)" if verbose else f.found for f in findings)

    look.__doc__ = f"dask-gpurt {check.id}: {check.name}."
    look.__name__ = look.__qualname__ = name_of(check)
    return look


def _line(f: Finding) -> str:
    return f"{f.name}: {f.found}; expected: {f.expected}. {f.meaning}. Remedy: {f.remedy}"


def name_of(check: Check) -> str:
    """The name of its entry point: ``gpurt_t6_cpu``, ``gpurt_swap``."""
    words = [check.id, check.name] if check.id[0] == "T" else [check.id]
    return "gpurt_" + "_".join(words).lower().replace(" ", "_")


#: the functions, by name; entry points are looked up as attributes of this module
ENTRIES = {name_of(check): _entry(check) for check in CHECKS}
globals().update(ENTRIES)
