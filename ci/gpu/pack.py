#!/usr/bin/env python3
"""Lay out RAPIDS' wheels in archives, for a GPU machine that reaches no package registry and is lent for minutes.

    python ci/gpu/pack.py OUT [ARCHITECTURE]      ->  OUT/part-00/site.tar.xz, OUT/part-01/libcudf.so.tar.xz

The archives hold what `pip install --target` makes of ``wheels-*.txt``, for CPython 3.12 on x86-64 Linux, whatever the
interpreter that runs this. `ci/gpu/unpack.sh` unpacks them, in any order; part 0 alone does for what needs no cuDF.
Of the machine code for GPUs only that for ARCHITECTURE stays (default 90: Hopper). cuDF's goes from 370 MB to 47 MB so,
and the lot fits two transfers of 64 MiB with a checkout in each; they were eight.
"""

from __future__ import annotations

import lzma
import pathlib
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile

#: with a checkout of 9.8 MiB it stays below 64 MiB
PART = 54 * 2**20
#: a file of this size has an archive, and a part, of its own
LARGE = 100 * 2**20
#: versions of glibc that a wheel may ask for; pip matches each exactly
GLIBC = (39, 35, 34, 31, 28, 27, 24, 17)
#: what nothing here reads: headers of C++ libraries, tests of others, UCX's own benchmarks
UNREAD = ("lib*/include", "lib*/lib*/cmake", "lib*/**/*.a", "**/tests", "libucx/lib/ucx/*perftest*", "bin")
#: magic number of a fat binary, and of its entries the kind that is machine code
FAT_BINARY, MACHINE_CODE = 0xBA55ED50, 2


def install(lists: list[pathlib.Path], site: pathlib.Path) -> None:
    """Wheels of the lists, without what they need."""
    platforms = [f"manylinux_2_{v}_x86_64" for v in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-compile"]
    command += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", "--target", str(site)]
    command += [word for platform in platforms for word in ("--platform", platform)]
    command += [word for path in lists for word in ("-r", str(path))]
    subprocess.run(command, check=True)


def leave_out_unread(site: pathlib.Path) -> None:
    """Remove `UNREAD`, and make files that are copies of another of their folder links to it."""
    for pattern in UNREAD:
        for path in sorted(site.glob(pattern)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    for path in sorted(site.rglob("*.so.*"), key=lambda p: -len(p.name)):
        for other in sorted(path.parent.glob(path.name.partition(".so")[0] + ".so*")):
            if len(other.name) < len(path.name) and not other.is_symlink() and other.read_bytes() == path.read_bytes():
                other.unlink()
                other.symlink_to(path.name)


def for_one_gpu(path: pathlib.Path, architecture: int) -> bool:
    """Overwrite machine code for other GPUs, and PTX, by zeros; whether there was any of a GPU.

    Sizes and offsets stay, so the driver finds the entry of its own GPU where it was, and loads no other.
    """
    data = bytearray(path.read_bytes())
    start = struct.pack("<I", FAT_BINARY)
    at, found = data.find(start), False
    while at >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", data, at)
        if version != 1 or header != 16 or at + header + size > len(data):  # four bytes like it, in something else
            at = data.find(start, at + 4)
            continue
        entry, end = at + header, at + header + size
        while entry < end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", data, entry)
            (target,) = struct.unpack_from("<I", data, entry + 28)
            found = True
            if kind != MACHINE_CODE or target != architecture:
                data[entry + entry_header : entry + entry_header + entry_size] = bytes(entry_size)
            entry += entry_header + entry_size
        at = data.find(start, end)
    if found:
        path.write_bytes(data)
    return found


def archive(site: pathlib.Path, files: list[pathlib.Path], target: pathlib.Path) -> None:
    """One compressed archive."""
    target.parent.mkdir(parents=True)
    with lzma.open(target, "wb", preset=9 | lzma.PRESET_EXTREME) as out, tarfile.open(fileobj=out, mode="w|") as tar:
        for path in files:
            tar.add(path, arcname=path.relative_to(site))
    size = target.stat().st_size
    print(target, f"{size / 2**20:.1f} MiB, {len(files)} files", flush=True)
    if size > PART:
        raise SystemExit(f"{target} has {size} bytes, a part may have {PART}. Remedy: leave out more (`UNREAD`)")


def main(out: str, architecture: int = 90) -> None:
    target = pathlib.Path(out)
    shutil.rmtree(target, ignore_errors=True)
    lists = sorted(pathlib.Path(__file__).parent.glob("wheels-*.txt"))
    with tempfile.TemporaryDirectory() as tmp:
        site = pathlib.Path(tmp)
        install(lists, site)
        leave_out_unread(site)
        for path in sorted(site.rglob("*.so*")):
            if not path.is_symlink() and for_one_gpu(path, architecture):
                print(f"of {path.name} the machine code for sm_{architecture} stays")
        files = sorted(path for path in site.rglob("*") if path.is_symlink() or path.is_file())
        large = [path for path in files if not path.is_symlink() and path.stat().st_size >= LARGE]
        archive(site, [path for path in files if path not in large], target / "part-00" / "site.tar.xz")
        for i, path in enumerate(large, start=1):
            archive(site, [path], target / f"part-{i:02d}" / f"{path.name}.tar.xz")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:]))
