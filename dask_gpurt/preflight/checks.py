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
    from collections.abc import Callable, Sequence

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
        _timed(
            _copied, "memory", bytearray, "raise the limit of the container or of ulimit -v, or test the node's memory"
        ),
        _timed(_disk, plan.folders),
        _timed(
            _copied, "device", plan.device, "see which process holds its memory (nvidia-smi); look for Xid in the log"
        ),
        computed,
    ], measured


def _timed(check: Callable[..., Finding], *args: Any) -> Finding:
    start = time.perf_counter()
    finding = check(*args)
    return dataclasses.replace(finding, seconds=round(time.perf_counter() - start, 6))


def _each(check: str, items: Sequence[str], test: Callable[[str], str], expected: str, remedy: str) -> Finding:
    """One finding of several items; `test` raises, or returns what is wrong with one."""
    wrong = {}
    for item in items:
        try:
            why = test(item)
        except BaseException as e:  # a broken library raises all kinds, SystemExit too
            why = f"{type(e).__name__}: {e}"
        if why:
            wrong[item] = why
    if not wrong:
        return Finding(check, State.OK if items else State.NONE)
    found = "; ".join(f"{item} ({why})" for item, why in wrong.items())
    return Finding(check, State.FAIL, found, expected, remedy.format(", ".join(wrong)))


def _imports(modules: Sequence[str], load: bool) -> Finding:
    def test(module: str) -> str:
        if load:
            importlib.import_module(module)
            return ""
        root = module.partition(".")[0]
        return "" if importlib.util.find_spec(root) is not None else f"ModuleNotFoundError: No module named {root!r}"

    remedy = "install {} in this worker's environment, or change gpurt.preflight-imports"
    return _each("imports", modules, test, "modules that can be imported", remedy)


def _disk(folders: Sequence[str]) -> Finding:
    data = _pattern(DISK_BYTES)

    def test(folder: str) -> str:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as f:
            fd = f.fileno()
            written = 0
            while written < len(data):
                written += os.write(fd, data[written:])
            os.fsync(fd)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # else the page cache would answer
            os.lseek(fd, 0, os.SEEK_SET)
            same = xxhash.xxh3_128_digest(f.read()) == xxhash.xxh3_128_digest(data)
        return "" if same else "what was read back has other bytes than what was written"

    return _each(
        "disk",
        folders,
        test,
        "a folder that can be written, synchronised and read back",
        "mount it writable, free space on it, or set gpurt.tiers.directory to another folder",
    )


def _copied(check: str, copy: Callable[[bytes], bytes | bytearray] | None, remedy: str) -> Finding:
    """An allocation in one tier, written and read."""
    if copy is None:
        return Finding(check, State.NONE)
    try:
        data = _pattern(HOST_BYTES)
        found = "" if copy(data) == data else "a copy has other bytes"
    except Exception as e:
        found = f"{type(e).__name__}: {e}"
    if not found:
        return Finding(check, State.OK)
    return Finding(check, State.FAIL, found, f"a copy of {HOST_BYTES:,} bytes", remedy)


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
