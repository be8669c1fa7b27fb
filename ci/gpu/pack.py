#!/usr/bin/env python3
"""Lay out the wheels of a list in parts, for a GPU machine that reaches no package registry.

    python ci/gpu/pack.py ci/gpu/wheels-core.txt OUT      ->  OUT/part-00, OUT/part-01, ...

Each part is a folder of at most `PART` bytes; they are carried over one by one, in any order, and `ci/gpu/unpack.sh`
puts them together. A wheel larger than a part is cut into NAME.whl.00, NAME.whl.01, ... Wheels are for CPython 3.12 on
x86-64 Linux, whatever the interpreter that runs this.
"""

from __future__ import annotations

import io
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

#: with a checkout of 9.5 MiB it stays below 64 MiB
PART = 53 * 2**20
#: wheels from here on to `PART` are compressed again, which leaves a third of UCX away
LARGE = 30 * 2**20
#: versions of glibc that a wheel may ask for; pip matches each exactly
GLIBC = (39, 35, 34, 31, 28, 27, 24, 17)
#: name and bytes of a wheel, or of a slice of one
Piece = tuple[str, bytes]


def requirements(path: pathlib.Path) -> list[str]:
    """The lines of a list that are no comments."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def download(wanted: str, folder: pathlib.Path) -> None:
    """Fetch one wheel, without what it needs."""
    platforms = [f"manylinux_2_{v}_x86_64" for v in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    command += [word for platform in platforms for word in ("--platform", platform)]
    subprocess.run([*command, "-d", str(folder), wanted], check=True)


def smaller(data: bytes) -> bytes:
    """A wheel compressed by LZMA, which pip unpacks as well; the files in it, and so its record, are the same."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_LZMA) as new:
        for item in old.infolist():
            new.writestr(item.filename, old.read(item))
    return out.getvalue()


def cut(name: str, data: bytes, most: int) -> list[Piece]:
    """A wheel in pieces of at most `most` bytes; one that fits keeps its name."""
    if len(data) <= most:
        return [(name, smaller(data) if len(data) >= LARGE else data)]
    return [(f"{name}.{i:02d}", data[at : at + most]) for i, at in enumerate(range(0, len(data), most))]


def fill(pieces: Sequence[Piece], most: int) -> list[list[Piece]]:
    """Parts of at most `most` bytes: first fit, largest first."""
    parts: list[list[Piece]] = []
    for name, data in sorted(pieces, key=lambda piece: -len(piece[1])):
        for part in parts:
            if sum(len(d) for _, d in part) + len(data) <= most:
                part.append((name, data))
                break
        else:
            parts.append([(name, data)])
    return parts


def main(wheels: str, out: str) -> None:
    target = pathlib.Path(out)
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as tmp:
        folder = pathlib.Path(tmp)
        for wanted in requirements(pathlib.Path(wheels)):
            download(wanted, folder)
        pieces = [piece for w in sorted(folder.glob("*.whl")) for piece in cut(w.name, w.read_bytes(), PART)]
    for i, part in enumerate(fill(pieces, PART)):
        where = target / f"part-{i:02d}"
        where.mkdir(parents=True)
        for name, data in part:
            (where / name).write_bytes(data)
        print(where, f"{sum(len(d) for _, d in part) / 2**20:.1f} MiB", len(part), "files")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
