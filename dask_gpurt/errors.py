"""One exception tree. Every message says the value, what is allowed, and the remedy.

::

    GpurtError
    ├── ConfigError (ValueError)        a key or value under ``gpurt:`` is wrong
    ├── InstallError (RuntimeError)     a part could not take over; nothing was changed
    │   └── SeamMismatch                this version of dask/distributed is not the one the seam was written for
    ├── StoreError
    │   ├── TierFull (OSError)          no room on a tier; the value stays where it was
    │   ├── Undelivered (OSError)       an object store does not give a copy back now; the copy stays
    │   ├── CorruptData                 length or checksum differ; that copy was dropped
    │   └── LostData (KeyError)         no valid copy is left here; the key must come from elsewhere
    ├── CorruptTransfer (OSError)       a value that was fetched fails its checksum; Dask fetches it again
    ├── NoAnswer (OSError)              a scheduler cannot be reached, or does not answer in time
    ├── TraceError                      a file is not a trace, or is damaged
    ├── WireError                       a shuffle message that does not parse, or fails its checksum
    ├── UnknownKey (KeyError)           nothing is known about a key that was asked for
    └── UnknownRun (LookupError)        there is no such run of a cluster, or not any more
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "CorruptData",
    "CorruptTransfer",
    "GpurtError",
    "InstallError",
    "LostData",
    "NoAnswer",
    "SeamMismatch",
    "StoreError",
    "TierFull",
    "TraceError",
    "Undelivered",
    "UnknownKey",
    "UnknownRun",
    "WireError",
]

#: characters of a message; of a longer one the begin and the end stay: the setting, and what is allowed with the remedy
_MOST, _BEGIN, _END = 2000, 600, 1000


def _bounded(text: str) -> str:
    """The begin and the end of a message that is too long: the value in the middle may have any length."""
    if len(text) <= _MOST:
        return text
    return f"{text[:_BEGIN]} ... ({len(text) - _BEGIN - _END} characters) ... {text[-_END:]}"


class GpurtError(Exception):
    """Root of everything raised on purpose by this package. Its message is bounded, whatever value it names."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(_bounded(a) if isinstance(a, str) else a for a in args))


class ConfigError(GpurtError, ValueError):
    """A key or a value under ``gpurt:`` is wrong."""


class InstallError(GpurtError, RuntimeError):
    """A part could not be installed. Whatever had been changed was put back."""


class SeamMismatch(InstallError):
    """A private name of dask or distributed is missing or has another signature than the one relied on."""


class StoreError(GpurtError):
    """A tier could not do what it was asked to; the docstring of the call says where the bytes are."""


class TierFull(StoreError, OSError):
    """No room on a tier (device full, quota or reserve reached). The value stays where it was."""


class Undelivered(StoreError, OSError):
    """An object store is down, slow or refuses. That says nothing about the copy, which stays."""

    #: it has delivered nothing for minutes: who reads is not to wait any longer
    lasting = False


class CorruptData(StoreError):
    """A stored copy has the wrong length or checksum. That copy was dropped."""


class LostData(StoreError, KeyError):
    """No valid copy is left on this worker; the key has to be fetched or computed again."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return Exception.__str__(self)


class CorruptTransfer(GpurtError, OSError):
    """A value that was fetched from another worker fails its checksum. Dask takes it for a lost connection."""


class NoAnswer(GpurtError, OSError):
    """A scheduler cannot be reached, or does not answer in time."""


class TraceError(GpurtError):
    """A file is not a trace, is of another version, or is damaged or cut off."""


class WireError(GpurtError):
    """A shuffle message does not parse or fails its checksum; nothing of it was used."""


class UnknownKey(GpurtError, KeyError):
    """Nothing is known about a key that was asked for, or nothing any more."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return Exception.__str__(self)


class UnknownRun(GpurtError, LookupError):
    """A cluster has had no run of that number, or does not keep it any more."""
