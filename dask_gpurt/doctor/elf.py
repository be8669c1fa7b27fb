"""`read`: what a shared object needs, from its dynamic section; and names that it may open by itself.

Plain Python, since neither readelf nor ldd is there in a small image, and ldd runs the file's own loader.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import re
import struct

_LOAD, _DYNAMIC = 1, 2
_NEEDED, _STRTAB, _STRSZ, _SONAME, _RPATH, _RUNPATH = 1, 5, 10, 14, 15, 29
_WRITEABLE = 2
#: how far names are looked for: kernels for GPUs make files of gigabytes
_SEARCHED_BYTES = 8 << 20
_OPENED = re.compile(rb"(?<=\0)lib[\w+-]{2,60}\.so[.\d]{0,8}(?=\0)")


@dataclasses.dataclass(frozen=True)
class SharedObject:
    """One ELF file."""

    path: str
    #: libraries without which it cannot be loaded
    needed: tuple[str, ...]
    soname: str
    #: folders that are searched for them first
    search: tuple[str, ...]
    #: libraries that it may open when it runs, as far as their names stand in it
    opened: frozenset[str]
    #: Python can import it under its file name
    is_extension: bool


def read(path: str) -> SharedObject | None:
    """One file; None: it is no shared object of 64 bits, or is cut off, or holds what debuggers need and no code.

    Raises
    ------
    OSError
        It cannot be read.
    """
    with open(path, "rb") as f:
        if f.read(5) != b"\x7fELF\x02":
            return None
        try:
            with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data)
        except (struct.error, ValueError, LookupError):
            return None


def _parse(path: str, data: mmap.mmap) -> SharedObject | None:
    order = "<" if data[5] == 1 else ">"
    (start,) = struct.unpack_from(f"{order}Q", data, 32)
    size, count = struct.unpack_from(f"{order}HH", data, 54)
    #: kind, flags, offset, address, (physical), bytes in the file
    headers = [struct.unpack_from(f"{order}IIQQQQ", data, start + i * size) for i in range(count)]
    dynamic = next((h for h in headers if h[0] == _DYNAMIC), None)
    if dynamic is None:
        return None
    entries = struct.iter_unpack(f"{order}QQ", data[dynamic[2] : dynamic[2] + dynamic[5] // 16 * 16])
    tags: dict[int, list[int]] = {}
    for tag, value in entries:
        tags.setdefault(tag, []).append(value)
    address, length = tags[_STRTAB][0], tags[_STRSZ][0]
    (offset, *_) = (h[2] + address - h[3] for h in headers if h[0] == _LOAD and h[3] <= address < h[3] + h[5])
    strings = data[offset : offset + length]

    def text(at: int) -> str:
        return strings[at : strings.index(b"\0", at)].decode("utf-8", "replace")

    folders = [folder for tag in (_RPATH, _RUNPATH) for at in tags.get(tag, ()) for folder in text(at).split(":")]
    origin = os.path.dirname(os.path.realpath(path))
    module = os.path.basename(path).partition(".")[0]
    return SharedObject(
        path=path,
        needed=tuple(text(at) for at in tags.get(_NEEDED, ())),
        soname=text(tags[_SONAME][0]) if _SONAME in tags else "",
        search=tuple(f.replace("$ORIGIN", origin).replace("${ORIGIN}", origin) for f in folders if f),
        opened=frozenset(_opened(data, headers) if b"\0dlopen\0" in strings else ()),
        is_extension=f"PyInit_{module}".encode() in strings,
    )


def _opened(data: mmap.mmap, headers: list[tuple[int, ...]]) -> set[str]:
    """Names among the constants."""
    out: set[str] = set()
    for kind, flags, offset, _, _, nbytes in headers:
        if kind == _LOAD and not flags & _WRITEABLE:
            part = data[offset : offset + min(nbytes, _SEARCHED_BYTES)]
            out |= {name.decode() for name in _OPENED.findall(part)}
    return out
