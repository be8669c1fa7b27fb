"""Compress messages between hosts, where the network is slower than compressing. Pure but for the clock.

`Squeezer.squeeze` compresses, `expanded` expands.

Theory of operation. Whether a frame of a message is compressed is decided for each by itself (columns of one dtype lie
together in one), from a sample of it and the bandwidth to that peer (`selector.LinkBandwidth`, `model.compression`). A
message of which anything is compressed gets an envelope before its frames::

    envelope   magic, version, frames, xxh3-64 of the rows that follow
               a row per frame: codec, bytes before, xxh3-64 of the bytes after; of one that is as it was, zeros
    frames     in their order

The message within has checksums of its own, over what was compressed; those of the envelope are so that nothing is
expanded that did not come as it was sent, and lengths are compared with the most a message may have before memory is
taken for them.

A message costs the receiver the memory of what it is expanded to. So it costs that much credit: the difference goes
with it as *room*.

Only between hosts: within one, memory is the link. Not by distributed's comms, which every message falls back to: it
goes there as it was.
"""

from __future__ import annotations

import math
import struct
import time
from typing import TYPE_CHECKING, Any

import xxhash

from dask_gpurt.errors import ConfigError, CorruptData, WireError
from dask_gpurt.model.compression import Choice, Chooser, compress, expand, installed
from dask_gpurt.shuffle.transport.link import records
from dask_gpurt.shuffle.transport.select.selector import SAFE, LinkBandwidth, Locality, TransportChooser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

MAGIC = b"GPRZ"
VERSION = 1
#: bytes of a message from which on it is looked at, and shows how fast the network is
LEAST = 1 << 18
#: frames below this are not sampled. On a link on which compression has a chance they take a millisecond
SAMPLED = 1 << 16
#: bytes per second of a link from which on nothing is looked at: lz4 alone does 0.7 GB/s
CEILING = 0.7e9
_HEAD = struct.Struct("<4sHHQ")
_ROW = struct.Struct("<IQQ")
#: number of a codec in an envelope; 0: none. Never changed, only added to
_NUMBERS = {"lz4": 1, "zstd": 2}
_NAMES = {number: name for name, number in _NUMBERS.items()}


class Squeezer:
    """Compress the messages of one worker. `squeeze` in any thread.

    Parameters
    ----------
    setting
        ``auto``, ``none``, or the codec for everything.
    count
        Adds to the counters `bytes_squeezed` (what compression saved) and `seconds_squeeze`.
    """

    def __init__(self, setting: str, count: Callable[..., None]) -> None:
        #: what this worker can read; once, as looking for a package that is not there takes its time
        self.codecs = installed()
        self._chooser = Chooser(setting, "gpurt.shuffle.codec", SAMPLED)
        self._count = count
        self._needed = set() if setting == "none" else {setting} if setting != "auto" else set(self._chooser.slowdown)

    def able(self, peer: TransportChooser, codecs: Iterable[str]) -> bool:
        """Whether messages to a peer may be compressed that can undo these codecs."""
        far = peer.place is Locality.REMOTE and peer.forced != SAFE
        return far and bool(self._needed) and self._needed <= set(codecs)

    def looks(self, pace: LinkBandwidth) -> bool:
        """Whether the next message to a peer is to be looked at; with an unknown pace, only if a user says so."""
        return self._chooser.setting != "auto" or (0 < pace.best < CEILING and pace.turn())

    def squeeze(self, frames: Sequence[Any], bytes_per_second: float) -> tuple[Sequence[Any], int]:
        """Compress a message: (frames to send, room: bytes of credit beyond theirs, 0 when nothing was gained).

        Parameters
        ----------
        bytes_per_second
            Of the network to the peer; 0: not known.
        """
        if len(frames) >= records.MAX_FRAMES:
            return frames, 0
        start = time.perf_counter()
        rows, out = bytearray(), []
        for frame in frames:
            view = memoryview(frame).cast("B")
            choice = self._chooser.choose(view, bytes_per_second or None, math.inf)
            small = self._compressed(choice, view) if choice.codec else None
            if small is None:
                rows += _ROW.pack(0, 0, 0)
                out.append(frame)
            else:
                rows += _ROW.pack(_NUMBERS[choice.codec], view.nbytes, xxhash.xxh3_64_intdigest(small))
                out.append(memoryview(small))
        head = _HEAD.pack(MAGIC, VERSION, len(out), xxhash.xxh3_64_intdigest(rows))
        squeezed = [memoryview(head + rows), *out]
        room = records.message_bytes(frames) - records.message_bytes(squeezed)
        self._count(seconds_squeeze=time.perf_counter() - start, bytes_squeezed=max(room, 0))
        return (squeezed, room) if room > 0 else (frames, 0)

    def _compressed(self, choice: Choice, view: memoryview) -> bytes | None:
        """None: it did not become smaller."""
        start = time.perf_counter()
        small = b"".join(compress(choice.codec, view))
        self._chooser.learn(choice, time.perf_counter() - start)
        return small if len(small) < view.nbytes else None


def expanded(frames: list[Any], limit: int) -> list[Any]:
    """The frames of a message, expanded where they were compressed; any thread.

    Parameters
    ----------
    limit
        Bytes of credit that the message cost, which are free for it. Compared before anything is allocated.

    Raises
    ------
    WireError
        It is not as it was sent, or longer than a message may be.
    """
    head = memoryview(frames[0]).cast("B") if frames and not records.is_device(frames[0]) else memoryview(b"")
    if head[: len(MAGIC)] != MAGIC:
        return frames
    if head.nbytes < _HEAD.size:
        raise WireError(f"the envelope of a message has {head.nbytes} bytes, must have at least {_HEAD.size}")
    _, version, count, digest = _HEAD.unpack_from(head)
    rows = head[_HEAD.size :]
    if version != VERSION:
        raise WireError(f"the envelope of a message is version {version}, must be {VERSION}")
    if count != len(frames) - 1 or rows.nbytes != count * _ROW.size:
        raise WireError(f"an envelope of {head.nbytes} bytes says {count} frames, there are {len(frames) - 1}")
    if xxhash.xxh3_64_intdigest(rows) != digest:
        raise WireError("the envelope of a message fails its checksum")
    table = list(_ROW.iter_unpack(rows))
    total = sum(row[1] if row[0] else records.size_of(frame) for row, frame in zip(table, frames[1:], strict=True))
    if total > limit:
        raise WireError(f"a message is {total} bytes when expanded, at most {limit} were paid for")
    out: list[Any] = []
    for frame, (number, nbytes, digest) in zip(frames[1:], table, strict=True):
        if not number:
            out.append(frame)
            continue
        name = _NAMES.get(number)
        if name is None:
            raise WireError(f"a frame is compressed with codec {number}, must be one of {_NAMES}")
        stored = memoryview(frame).cast("B")
        if xxhash.xxh3_64_intdigest(stored) != digest:
            raise WireError("a compressed frame of a message fails its checksum")
        try:
            out.append(expand(name, stored, nbytes))
        except (CorruptData, ConfigError) as e:
            raise WireError(str(e)) from e
    return out
