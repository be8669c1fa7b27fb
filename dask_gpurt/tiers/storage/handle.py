"""A copy of a value on a lower tier: how it is read (`Handle`), by which codec, and what can go wrong.

A tier gets a value as *groups* of frames (`Group`) from a `Codec`, and gives a `Handle` for them.
"""

from __future__ import annotations

import dataclasses
import errno
import traceback
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dask_gpurt.model.shards import Buffer

#: a part of a stored value that can be read alone, and its frames
Group = tuple[int, "Sequence[Buffer]"]
_Stored = TypeVar("_Stored")
_T = TypeVar("_T")


class Codec(Protocol):
    """Objects to frames and back. All methods are called in I/O threads."""

    def encode(self, value: Any, parts: Sequence[int] | None) -> list[Group]:
        """Contiguous frames in groups. Any exception means: this object cannot be stored."""

    def decode(self, frames: list[memoryview]) -> Any:
        """The reverse, for the frames of all groups one after the other."""


@dataclasses.dataclass(slots=True)
class IoCost:
    """What one write or read took."""

    #: bytes written to or read from the tier
    nbytes: int = 0
    #: seconds in system calls and checksums
    io_seconds: float = 0.0
    #: seconds between objects and frames, compressing and expanding included
    codec_seconds: float = 0.0


class Handle(Protocol):
    """Immutable. `load` and `load_part` are called in I/O threads, never at the same time as `free`."""

    @property
    def nbytes(self) -> int:
        """Bytes it takes on its tier."""

    def load(self, codec: Codec) -> tuple[Any, IoCost]:
        """Read, verify, decode.

        Raises
        ------
        CorruptData
            Length or checksum differ.
        Undelivered
            An object store does not answer, or refuses; the copy may be good.
        OSError
            The tier could not read.
        DecodeError
            The bytes are right; the object's own code raised while it was rebuilt (``__cause__``).
        """

    def load_part(self, part: int) -> tuple[list[memoryview], IoCost]:
        """Verified frames of one part. KeyError when it was not written; else raises as `load`."""

    def free(self) -> None:
        """Give the space back. Does not raise for a copy that is gone already."""


def another(handle: Handle) -> Handle | None:
    """Make a second claim on a copy, so that it stays until both are freed; None where a tier has no claims."""
    again = getattr(handle, "again", None)
    return None if again is None else again()


def is_copy(handle: Handle, groups: Sequence[Group]) -> bool:
    """Whether a copy is of these frames, without reading it; False where a tier cannot tell. In an I/O thread."""
    same = getattr(handle, "is_of", None)
    return same is not None and bool(same(groups))


def compressing_seconds(handle: Handle) -> float:
    """What of its write was that; 0 where a tier does not tell."""
    return float(getattr(handle, "compressing_seconds", 0.0))


def is_shared(handle: Handle) -> bool:
    """Whether several have a claim on a copy."""
    claims: list[int] = getattr(handle, "claims", [1])
    return claims[0] > 1


class EncodeError(Exception):
    """The object cannot be turned into frames (``__cause__``). It stays in memory."""


class DecodeError(Exception):
    """The frames are intact, but the object's own code raised (``__cause__``)."""


def decoded(decode: Callable[[_Stored], Any], stored: _Stored) -> Any:
    """The value of what was stored; DecodeError where its own code raises."""
    try:
        return decode(stored)
    except Exception as e:
        raise DecodeError from e
    except KeyboardInterrupt:  # of a process that is to end
        raise
    except BaseException as e:
        # A panic of an extension in Rust is one. As text: distributed's worker handles no exception that is none of
        # `Exception`, and the task that reads the value would never end.
        raise DecodeError from RuntimeError(f"the value cannot be unpickled: {type(e).__name__}: {e}")


def without_values(error: BaseException) -> BaseException:
    """What an object's own code raised, or another error of a read, to be kept.

    The frames in its traceback are emptied. They have the value and the bytes it was read from, which would stay in
    memory: Dask keeps the errors of tasks. Those of `error` too, as frames of its cause refer to them as their callers.
    """
    raised = error
    if isinstance(error, DecodeError) and error.__cause__ is not None:
        raised = error.__cause__
    seen: list[BaseException] = []  # user code may have made it a cause of itself
    each: BaseException | None = error
    while each is not None and not any(each is other for other in seen):
        traceback.clear_frames(each.__traceback__)
        seen.append(each)
        each = each.__cause__
    return raised


def as_raised(load: Callable[..., _T], *args: Any) -> _T:
    """What `load` gives, for who asked for the value: what the object's own code raised comes as it is."""
    try:
        return load(*args)
    except DecodeError as e:
        error = without_values(e)
    try:
        raise error  # not above: it would refer to `e`, and that to it, and no such error can be pickled
    finally:
        del error  # its traceback has this frame


def error_kind(error: BaseException) -> str:
    """A short name to count an error under: ``ENOSPC``, or the name of the exception."""
    if isinstance(error, OSError) and error.errno is not None:
        return errno.errorcode.get(error.errno, str(error.errno))
    return type(error).__name__
