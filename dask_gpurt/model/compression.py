"""Compression of frames: which pays, decided per frame, and the block format. For what is spilled, and what is sent.

On a local NVMe disk compression mostly loses (a codec does 0.5 GB/s, the disk 2), on a slow or a shared disk, on an
object store, over a slow network and for sparse data it wins. So `auto` compares expected seconds per byte for a write
and a read::

    none   1/W + 1/R
    c      1/C + ratio/W + ratio/R + 1/D

W and R are the bandwidths of the tier, learned from its own transfers (`Rate`); of a link, W is its bandwidth, and
nothing is read (1/R is 0). Ratio, C and D come from a sample of the frame itself: a few pieces of 16 KiB, about 1/128
of the frame, which costs a percent or so. Where its two ends say that nothing is gained, they are all: 10 to 70 us. A
codec has to win by `MARGIN`. A sample is faster than the whole: it lies in the processor's cache, and does not wait.
So C and D are corrected by what compressing really took in comparison, learned per codec (`Chooser.learn`): 2 on a
quiet machine, 5 on one whose cores are all busy with tasks. zstd is sampled only where the tier is slow enough for it
to have a chance. Frames below `SAMPLED` bytes are not worth a look, but where room is short (`least_room`).

A compressed frame is a row of blocks of up to 1 MiB, each behind four bytes of length (the top bit: stored as it is).
So it streams in both directions, needs no second buffer of the size of the frame to be made, and cannot grow by more
than four bytes per MiB.

lz4 and zstandard are optional: without them `auto` knows what is there, and naming one that is missing is an error.
"""

from __future__ import annotations

import importlib
import math
import struct
import threading
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy

from dask_gpurt.errors import ConfigError, CorruptData

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from dask_gpurt.model.shards import Buffer

#: bytes from which on `auto` samples a frame
SAMPLED = 1 << 18
#: a named codec compresses frames from this size on
LEAST = 1 << 12
#: how much longer compressing takes than a sample says, before anything was learned
SLOWDOWN = 2.0
#: share of the time without compression that a codec may take at most to be chosen
MARGIN = 0.92
#: bytes per second of a tier (written and read) above which zstd has no chance
ZSTD_CEILING = 0.5e9
#: what is assumed of a tier before its first transfer; no codec is near it
_UNKNOWN = 1e9
#: seconds per byte of a tier where room is all that counts
_DEAR = 1.0
#: a frame that shrinks below this share of its bytes is looked at once more before its codec counts as slow
LITTLE = 0.1
_BLOCK = 1 << 20
_PIECE = 1 << 14
_LENGTH = struct.Struct("<I")
_RAW = 1 << 31
_PACKAGES = {"lz4": "lz4.block", "zstd": "zstandard"}


class Rate:
    """Bytes per second, learned: the last few hundred MB count most. Thread-safe."""

    #: transfers below this say more about latency
    LEAST_BYTES = 1 << 20

    def __init__(self, window_bytes: float = 256e6) -> None:
        self._window_bytes = window_bytes
        self._bytes = self._seconds = 0.0
        self._lock = threading.Lock()

    def add(self, nbytes: int, seconds: float) -> None:
        """A transfer has taken so long; short ones are not learned from."""
        if nbytes < self.LEAST_BYTES or seconds <= 0:
            return
        with self._lock:
            keep = min(1.0, self._window_bytes / (self._bytes + nbytes))
            self._bytes = (self._bytes + nbytes) * keep
            self._seconds = (self._seconds + seconds) * keep

    @property
    def bytes_per_second(self) -> float | None:
        """None: nothing was transferred yet."""
        with self._lock:
            return self._bytes / self._seconds if self._seconds else None


class BlockCodec(Protocol):
    """One way of compressing a block."""

    def compress(self, block: Buffer) -> bytes:
        """The block, compressed."""

    def expand_into(self, block: Buffer, target: memoryview) -> int:
        """Fill `target`; returns the bytes written."""


class _Lz4:
    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def compress(self, block: Buffer) -> bytes:
        return self._module.compress(block, store_size=False)

    def expand_into(self, block: Buffer, target: memoryview) -> int:
        data = self._module.decompress(block, uncompressed_size=target.nbytes)
        n = min(len(data), target.nbytes)
        target[:n] = data[:n]
        return len(data)


class _Zstd:
    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._local = threading.local()  # its contexts are not thread-safe

    def compress(self, block: Buffer) -> bytes:
        if not hasattr(self._local, "compressor"):
            self._local.compressor = self._module.ZstdCompressor(level=1)
        return self._local.compressor.compress(block)

    def expand_into(self, block: Buffer, target: memoryview) -> int:
        if not hasattr(self._local, "expander"):
            # A frame says how much memory it wants for its window. No block of ours wants more than its own length.
            self._local.expander = self._module.ZstdDecompressor(max_window_size=_BLOCK)
        with self._local.expander.stream_reader(block) as reader:
            total = 0
            while total < target.nbytes:
                n = reader.readinto(target[total:])
                if not n:
                    break
                total += n
        return total


_MAKERS: dict[str, Callable[[ModuleType], BlockCodec]] = {"lz4": _Lz4, "zstd": _Zstd}
_codecs: dict[str, BlockCodec] = {}


def codec_of(name: str, setting: str = "gpurt.tiers.codec") -> BlockCodec:
    """ConfigError, with the remedy and the setting that asks for it, when its package is not installed."""
    codec = _codecs.get(name)
    if codec is None:
        try:
            module = importlib.import_module(_PACKAGES[name])
        except ImportError as e:
            package = _PACKAGES[name].partition(".")[0]
            raise ConfigError(
                f"{setting} is {name!r}, which needs the package {package}, and that cannot be imported here "
                f"({e}). Remedy: install {package} on the workers, or set {setting} to auto or none"
            ) from e
        codec = _codecs[name] = _MAKERS[name](module)
    return codec


def installed() -> list[str]:
    """Names of the codecs that can be used here."""
    names = []
    for name in _MAKERS:
        try:
            codec_of(name)
        except ConfigError:
            continue
        names.append(name)
    return names


class Choice(NamedTuple):
    """How a frame is stored."""

    #: a name of `codec_of`, or "" for as it is
    codec: str
    #: what compressing it would take if the rest were as fast as the sample; 0: it was not sampled
    seconds: float = 0.0
    #: of its bytes that are expected to stay; 0: it was not sampled
    ratio: float = 0.0


class Chooser:
    """Which codec a frame gets, on one tier or from one worker. Thread-safe.

    Parameters
    ----------
    setting
        ``auto``, ``none``, or the codec for every frame of at least `LEAST` bytes.
    name
        Of the setting, for errors.
    sampled
        Bytes from which on ``auto`` samples a frame.
    """

    def __init__(self, setting: str = "none", name: str = "gpurt.tiers.codec", sampled: int = SAMPLED) -> None:
        self.setting = setting
        self.sampled = sampled
        if setting not in ("auto", "none"):
            codec_of(setting, name)
        #: codec -> how much longer it really takes than a sample says
        self.slowdown = dict.fromkeys(installed() if setting == "auto" else [], SLOWDOWN)
        self._lock = threading.Lock()

    @property
    def can_compress(self) -> bool:
        """Some frames may come out smaller."""
        return self.setting not in ("auto", "none") or bool(self.slowdown)

    def choose(self, frame: memoryview, write: float | None, read: float | None, *, least_room: bool = False) -> Choice:
        """How to store a frame.

        Parameters
        ----------
        write, read
            Bytes per second of the tier; None when not known, infinite where nothing of the kind is done.
        least_room
            ``auto`` takes what makes it smallest, however long that takes.
        """
        if self.setting == "none":
            return Choice("", ratio=1.0)
        if self.setting != "auto":
            return Choice(self.setting if frame.nbytes >= LEAST else "")
        if frame.nbytes < (LEAST if least_room else self.sampled):
            return Choice("", ratio=1.0)
        per_byte = 1 / (write or _UNKNOWN) + 1 / (read or write or _UNKNOWN)
        if least_room:
            per_byte = _DEAR
        best, best_seconds = Choice("", ratio=1.0), MARGIN * per_byte
        for name, slowdown in self.slowdown.items():
            if name == "zstd" and per_byte < 2 / ZSTD_CEILING:
                continue
            sample = _Sample()
            for look, seconds in enumerate(sample.take(codec_of(name), frame)):
                taken = seconds * slowdown + sample.ratio * per_byte
                # The first two calls may be slow, as nothing is in the cache. What shrinks so much is quick as a rule.
                in_doubt = look < 2 and sample.ratio < LITTLE
                if sample.ratio > 0.97 or (taken > 1.3 * best_seconds and not in_doubt):
                    break  # hopeless: look no further
            if sample.ratio < 0.95 and taken < best_seconds:
                best, best_seconds = Choice(name, sample.compressing * frame.nbytes, sample.ratio), taken
            with self._lock:  # what was learned when the machine was busy fades
                self.slowdown[name] += 0.02 * (SLOWDOWN - self.slowdown[name])
        return best

    def least_bytes(self, frame: memoryview) -> float:
        """What it is expected to take when made as small as it gets; 0: not known."""
        return frame.nbytes * self.choose(frame, None, None, least_room=True).ratio

    def learn(self, choice: Choice, seconds: float) -> None:
        """Compressing took so long."""
        if choice.seconds > 0:
            with self._lock:
                factor = self.slowdown[choice.codec]
                self.slowdown[choice.codec] = factor + 0.25 * (seconds / choice.seconds - factor)


class _Sample:
    """What a few pieces of a frame say. The fastest counts: others may have been interrupted.

    The clock is the processor time of this thread. After each call it waits for the interpreter, up to 5 ms where a
    task computes in pure Python, and that says nothing about the frame. `Chooser.learn` hears of it.
    """

    def __init__(self) -> None:
        self._compressing = self._expanding = math.inf
        self._small = self._whole = 0

    @property
    def compressing(self) -> float:
        """Seconds per byte."""
        return self._compressing

    @property
    def ratio(self) -> float:
        return self._small / self._whole

    def take(self, codec: BlockCodec, frame: memoryview) -> Iterator[float]:
        """Sample piece after piece; yields seconds per byte, of compressing at first, then of expanding as well."""
        if frame.nbytes <= 2 * _PIECE:  # its ends are the same bytes, and the second would shrink to nothing
            block = self._compress(codec, frame)
            yield self._compressing
            yield self._expand(codec, block, frame.nbytes)
            return
        # Both ends, unlike each other if the frame is uneven, in one call: most frames that gain nothing cost no other.
        block = self._compress(codec, b"".join((frame[:_PIECE], frame[-_PIECE:])))
        yield self._compressing
        yield self._expand(codec, block, 2 * _PIECE)
        count = min(16, max(3, frame.nbytes // 128 // _PIECE))
        step = frame.nbytes // count
        for at in range(step, (count - 1) * step, step):
            yield self._expand(codec, self._compress(codec, frame[at : at + _PIECE]), _PIECE)

    def _compress(self, codec: BlockCodec, piece: Buffer) -> bytes:
        start = time.thread_time()
        block = codec.compress(piece)
        nbytes = memoryview(piece).nbytes
        self._compressing = min(self._compressing, (time.thread_time() - start) / nbytes)
        self._small += len(block)
        self._whole += nbytes
        return block

    def _expand(self, codec: BlockCodec, block: bytes, nbytes: int) -> float:
        out = memoryview(bytearray(nbytes))
        start = time.thread_time()
        codec.expand_into(block, out)
        self._expanding = min(self._expanding, (time.thread_time() - start) / nbytes)
        return self._compressing + self._expanding


def compress(name: str, frame: memoryview) -> Iterator[memoryview]:
    """The stored pieces of a frame, made one block at a time."""
    codec = codec_of(name)
    for at in range(0, frame.nbytes, _BLOCK):
        block = frame[at : at + _BLOCK]
        small = codec.compress(block)
        if len(small) < block.nbytes:
            yield memoryview(_LENGTH.pack(len(small)))
            yield memoryview(small)
        else:
            yield memoryview(_LENGTH.pack(block.nbytes | _RAW))
            yield block


def expand(name: str, stored: memoryview, nbytes: int) -> memoryview:
    """The frame again, in fresh, writeable memory. CorruptData when the pieces do not make `nbytes`."""
    codec = codec_of(name)
    out = numpy.empty(nbytes, "u1").data
    at = done = 0
    while done < nbytes:
        if at + _LENGTH.size > stored.nbytes:
            raise CorruptData(f"a compressed frame ends after {done} of {nbytes} bytes")
        (length,) = _LENGTH.unpack_from(stored, at)
        at += _LENGTH.size
        block = stored[at : at + (length & ~_RAW)]
        at += block.nbytes
        target = out[done : done + _BLOCK]
        if length & _RAW:
            if block.nbytes != target.nbytes:
                raise CorruptData(f"a block of {block.nbytes} bytes, not {target.nbytes}")
            target[:] = block
        else:
            try:
                made = codec.expand_into(block, target)
            except Exception as e:  # each library has an exception of its own
                raise CorruptData(f"a compressed block cannot be expanded: {e!r}") from e
            if made != target.nbytes:
                raise CorruptData(f"a compressed block makes {made} bytes, not {target.nbytes}")
        done += target.nbytes
    return out


def most_stored(nbytes: int) -> int:
    """Bytes that a compressed frame of `nbytes` takes at most."""
    return nbytes + _LENGTH.size * (nbytes // _BLOCK + 1)


class Timer:
    """Tells compressing from writing: seconds since it was made, without those spent in what it is around."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        #: seconds spent in iterators and calls
        self.inside = 0.0

    def call(self, function: Callable[[memoryview], int], view: memoryview) -> int:
        """``function(view)``; its time is counted as `inside`."""
        start = time.perf_counter()
        try:
            return function(view)
        finally:
            self.inside += time.perf_counter() - start

    def around(self, pieces: Iterator[memoryview]) -> Iterator[memoryview]:
        """The same pieces; the time to make them is counted as `inside`."""
        while True:
            start = time.perf_counter()
            piece = next(pieces, None)
            self.inside += time.perf_counter() - start
            if piece is None:
                return
            yield piece

    @property
    def seconds_outside(self) -> float:
        """Seconds since it was made, without those `inside`."""
        return time.perf_counter() - self._start - self.inside
