"""`Installed`: the distributions of an environment, what they require, and the shared objects in them."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
import sysconfig
from functools import cached_property
from typing import TYPE_CHECKING

from dask_gpurt.doctor import elf

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from packaging.requirements import Requirement

    from dask_gpurt.doctor.elf import SharedObject

_FOLDERS = ("/lib", "/usr/lib", "/lib64", "/usr/lib64", "/usr/local/lib")
_CACHE = "/etc/ld.so.cache"


def normal(name: str) -> str:
    """A distribution's name as it is compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


class Installed:
    """What is installed, read once.

    Parameters
    ----------
    path
        Folders with distributions, as `sys.path`.
    """

    def __init__(self, path: Sequence[str] | None = None) -> None:
        self.distributions: dict[str, importlib.metadata.Distribution] = {}
        for d in importlib.metadata.distributions(path=list(sys.path if path is None else path)):
            if d.name:
                self.distributions.setdefault(normal(d.name), d)
        #: files that could not be read
        self.unreadable: list[str] = []

    @cached_property
    def objects(self) -> dict[str, list[SharedObject]]:
        """By distribution, its shared objects."""
        out: dict[str, list[SharedObject]] = {}
        for name, d in self.distributions.items():
            for file in d.files or ():
                if ".so" not in file.name or not re.search(r"\.so(\.\d+)*$", file.name):
                    continue
                try:
                    found = elf.read(str(file.locate()))
                except FileNotFoundError:
                    continue  # removed by hand, as slim images do
                except OSError as e:
                    self.unreadable.append(f"{file}: {e.strerror}")
                    continue
                if found is not None:
                    out.setdefault(name, []).append(found)
        return out

    @cached_property
    def shipped(self) -> dict[str, SharedObject]:
        """By file name and by soname. Loaders of wheels open libraries of other wheels before they are needed."""
        out: dict[str, SharedObject] = {}
        for objects in self.objects.values():
            for o in objects:
                out.setdefault(os.path.basename(o.path), o)
                if o.soname:
                    out.setdefault(o.soname, o)
        return out

    @cached_property
    def _of_system(self) -> set[str]:
        """File names that the loader knows."""
        folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), *_FOLDERS]
        # Those of Debian, which images without a cache (distroless) have too.
        folders += [f"{folder}/{sysconfig.get_config_var('MULTIARCH')}" for folder in _FOLDERS]
        folders += [sysconfig.get_config_var("LIBDIR") or "", os.path.join(sys.base_prefix, "lib")]
        out: set[str] = set()
        for folder in folders:
            if folder and os.path.isdir(folder):
                out |= {name for name in os.listdir(folder) if ".so" in name}
        try:
            with open(_CACHE, "rb") as f:
                out |= {name.decode() for name in re.findall(rb"[\w.+-]+\.so[\w.]*", f.read())}
        except OSError:
            pass  # musl has none
        return out

    def missing(self, extension: SharedObject) -> dict[str, str]:
        """Libraries without which it cannot be loaded, and the file that needs them."""
        out: dict[str, str] = {}
        seen: set[str] = set()
        left = [extension]
        while left:
            o = left.pop()
            for name in o.needed:
                if name in seen:
                    continue
                seen.add(name)
                if name in self.shipped:
                    left.append(self.shipped[name])
                elif name not in self._of_system and not any(os.path.exists(os.path.join(f, name)) for f in o.search):
                    out[name] = os.path.basename(o.path)
        return out

    def requirements(self, name: str) -> Iterator[tuple[Requirement, str]]:
        """What a distribution asks for, and the extra that asks for it ("" for none), on this platform."""
        from packaging.requirements import InvalidRequirement, Requirement

        d = self.distributions[name]
        extras = ["", *(d.metadata.get_all("Provides-Extra") or ())]
        for line in d.requires or ():
            try:
                r = Requirement(line)
            except InvalidRequirement:
                continue
            extra = next((e for e in extras if r.marker is None or r.marker.evaluate({"extra": e})), None)
            if extra is not None:
                yield r, extra

    def asked_for_by(self, name: str) -> list[str]:
        """Who asks for a distribution: names, with the extra in brackets."""
        return sorted(self._requirers.get(name, ()))

    @cached_property
    def _requirers(self) -> dict[str, set[str]]:
        out: dict[str, set[str]] = {}
        for name in self.distributions:
            for r, extra in self.requirements(name):
                out.setdefault(normal(r.name), set()).add(f"{name}[{extra}]" if extra else name)
        return out

    def nbytes(self, name: str) -> int:
        """Bytes of its files on disk."""
        total = 0
        for file in self.distributions[name].files or ():
            try:
                total += os.stat(str(file.locate())).st_size
            except OSError:
                continue
        return total
