"""Names of all cases, and which set each belongs to.

The *look* set is for finding out why something is slow. The *held* set is run once, when all else is done, so that its
figures say something about work that was not looked at. A case's set follows from its name alone: a third of the
programs and patterns is held, and the random graphs with odd seeds. Adding a case moves no other.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

SETS = ("look", "held")


class Scale(NamedTuple):
    """How large a program is: it makes a few chunks per worker."""

    workers: int
    #: edge of a square chunk of float64
    grain: int

    @property
    def rows(self) -> int:
        """Rows of a chunk with eight columns that is as large as a square one."""
        return self.grain * self.grain // 8


class Program(NamedTuple):
    """A function that uses dask as a user would, and returns a small answer."""

    name: str
    family: str
    run: Callable[[Scale], object]


PROGRAMS: dict[str, Program] = {}


def program(family: str) -> Callable[[Callable[[Scale], object]], Callable[[Scale], object]]:
    """Register a program under its function's name."""

    def register(function: Callable[[Scale], object]) -> Callable[[Scale], object]:
        name = function.__name__
        if name in PROGRAMS:
            raise ValueError(f"there are two programs called {name!r}")
        PROGRAMS[name] = Program(name, family, function)
        return function

    return register


def set_of(name: str) -> str:
    """``look`` or ``held``."""
    family, _, seed = name.rpartition("-")
    if family == "random":
        return SETS[int(seed) % 2]
    return SETS[zlib.crc32(name.encode()) % 3 == 0]
