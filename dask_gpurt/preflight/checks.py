"""The checks of one worker. Each returns a `Finding`; none raises.

`run` makes them one after the other, in a thread: they block. Probes of peers need the event loop and are in `worker`.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.util
import os
import tempfile
import time
from typing import TYPE_CHECKING, Any

import xxhash

from dask_gpurt.backends.system import System
from dask_gpurt.preflight import known_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

#: what the engines import when they first need it
OURS = ("numpy", "pandas", "pyarrow", "dask.dataframe", "msgpack", "xxhash")
#: bytes written to each folder, and allocated in memory
DISK_BYTES = 1 << 18
HOST_BYTES = 1 << 24
#: for the known answer, memory limits below this many times its need are too small
ROOM = 8


class State(enum.StrEnum):
    """What a check says."""

    OK = "ok"
    #: weak evidence, or nothing that keeps a worker from working
    WARN = "warn"
    FAIL = "fail"
    #: there was nothing to check
    NONE = "n/a"


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    state: State
    found: str = ""
    expected: str = ""
    remedy: str = ""
    seconds: float = 0.0

    def said(self) -> str:
        """In one line."""
        text = f"{self.check}: {self.found}"
        text += f", expected {self.expected}" if self.expected else ""
        return text + (f". Remedy: {self.remedy}" if self.remedy else "")

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**dataclasses.asdict(self), "state": self.state.value}

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> Finding:
        """What `to_dict` made. Raises ValueError, KeyError or TypeError for anything else."""
        return cls(**{**told, "state": State(told["state"])})


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to check on one worker."""

    #: modules
    imports: tuple[str, ...]
    #: import them; else only look whether they are there, which takes no memory
    load: bool
    folders: tuple[str, ...]
    #: 0: none
    memory_limit_bytes: int
    #: whether to compute the known answer; the worker has tasks otherwise
    compute: bool = True
    #: copies bytes to the device and back; None: the worker has no device tier
    device: Callable[[bytes], bytes] | None = None


def run(plan: Plan) -> tuple[list[Finding], known_answer.Measured | None]:
    """All checks; the measured time is None where the known answer was not computed. Blocks."""
    computed, measured = partition(plan)
    return [
        _timed(_imports, plan.imports, plan.load),
        _timed(_host),
        _timed(_disk, plan.folders),
        _timed(_device, plan.device),
        computed,
    ], measured


def _timed(check: Callable[..., Finding], *args: Any) -> Finding:
    start = time.perf_counter()
    finding = check(*args)
    return dataclasses.replace(finding, seconds=round(time.perf_counter() - start, 6))


def _imports(modules: Iterable[str], load: bool) -> Finding:
    wrong = {}
    for module in dict.fromkeys(modules):
        try:
            if load:
                importlib.import_module(module)
            elif importlib.util.find_spec(module.partition(".")[0]) is None:
                raise ModuleNotFoundError(f"No module named {module.partition('.')[0]!r}")
        except BaseException as e:  # a broken library raises all kinds, SystemExit too
            wrong[module] = f"{type(e).__name__}: {e}"
    if not wrong:
        return Finding("imports", State.OK)
    return Finding(
        "imports",
        State.FAIL,
        "; ".join(f"{module} ({why})" for module, why in wrong.items()),
        "modules that can be imported",
        f"install {', '.join(wrong)} in this worker's environment, or change gpurt.preflight-imports",
    )


def _host() -> Finding:
    try:
        pattern = _pattern(HOST_BYTES)
        same = xxhash.xxh3_128_digest(bytearray(pattern)) == xxhash.xxh3_128_digest(pattern)
    except MemoryError:
        return Finding(
            "memory",
            State.FAIL,
            f"no {HOST_BYTES:,} bytes could be allocated",
            "an allocation that succeeds",
            "raise the limit of the container or of ulimit -v, or lower the worker's --memory-limit",
        )
    if same:
        return Finding("memory", State.OK)
    return Finding(
        "memory", State.FAIL, "a copy has other bytes", "the same bytes", "take this node out; test its memory"
    )


def _disk(folders: Sequence[str]) -> Finding:
    wrong = {}
    for folder in folders:
        try:
            if not _writes(folder):
                wrong[folder] = "what was read back has other bytes than what was written"
        except OSError as e:
            wrong[folder] = f"{type(e).__name__}: {e}"
    if not wrong:
        return Finding("disk", State.OK if folders else State.NONE)
    return Finding(
        "disk",
        State.FAIL,
        "; ".join(f"{folder} ({why})" for folder, why in wrong.items()),
        "a folder that can be written, synchronised and read back",
        "mount it writable, free space on it, or set gpurt.tiers.directory to another folder",
    )


def _writes(folder: str) -> bool:
    """Write, synchronise, read back from the device and compare."""
    data = _pattern(DISK_BYTES)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as f:
        fd = f.fileno()
        written = 0
        while written < len(data):
            written += os.write(fd, data[written:])
        os.fsync(fd)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # else the page cache would answer
        os.lseek(fd, 0, os.SEEK_SET)
        return xxhash.xxh3_128_digest(f.read()) == xxhash.xxh3_128_digest(data)


def _device(echo: Callable[[bytes], bytes] | None) -> Finding:
    if echo is None:
        return Finding("device", State.NONE)
    data = _pattern(HOST_BYTES)
    try:
        same = echo(data) == data
    except Exception as e:
        found = f"{type(e).__name__}: {e}"
    else:
        if same:
            return Finding("device", State.OK)
        found = "what came back from the device has other bytes"
    return Finding(
        "device",
        State.FAIL,
        found,
        f"{HOST_BYTES:,} bytes to the device and back",
        "see which process holds its memory (nvidia-smi), or the kernel's log for Xid; reset it or take it out",
    )


def partition(plan: Plan) -> tuple[Finding, known_answer.Measured | None]:
    """Compute the known answer; the measured time is None where it was not computed, or is wrong. Blocks."""
    name = "partition"
    if not plan.compute:
        return Finding(name, State.NONE, "the worker always had tasks"), None
    if 0 < plan.memory_limit_bytes < ROOM * known_answer.MEMORY_BYTES:
        return Finding(
            name, State.NONE, f"a memory limit of {plan.memory_limit_bytes:,} bytes is too small for it"
        ), None
    try:
        measured = known_answer.measure(System())
    except Exception as e:
        return Finding(
            name, State.FAIL, f"{type(e).__name__}: {e}", "an answer", "install numpy again in this environment"
        ), None
    if measured.digest != known_answer.ANSWER:
        return Finding(
            name,
            State.FAIL,
            f"answer {measured.digest}",
            known_answer.ANSWER,
            "take this node out: a core or its memory computes wrongly (see the kernel's log for machine checks)",
            measured.seconds,
        ), None
    return Finding(name, State.OK, seconds=round(measured.seconds, 6)), measured


def _pattern(nbytes: int) -> bytes:
    """Bytes that do not repeat within a page: 8-byte blocks of a counter, scattered."""
    block = b"".join((i * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "little") for i in range(1 << 12))
    return (block * (nbytes // len(block) + 1))[:nbytes]
