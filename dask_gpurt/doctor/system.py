"""`System`: files below a root, so that a recorded tree stands for ``/sys`` and ``/proc``; and time that passes."""

from __future__ import annotations

import os
import time


class System:
    """Text files of the kernel. What is not there, or may not be read, is None or empty.

    Parameters
    ----------
    root
        The folder that stands for ``/``.
    """

    def __init__(self, root: str = "/") -> None:
        self.root = root

    def path(self, *parts: str) -> str:
        """A path below the root; parts are relative."""
        return os.path.join(self.root, *(p.lstrip("/") for p in parts))

    def text(self, *parts: str) -> str | None:
        """A file's text without white space around it; None: it cannot be read."""
        try:
            with open(self.path(*parts), encoding="utf-8", errors="replace") as f:
                return f.read().strip()
        except OSError:
            return None

    def number(self, *parts: str) -> int | None:
        """The whole number that a file begins with, decimal or 0x hexadecimal; None: there is none."""
        words = (self.text(*parts) or "").split()
        try:
            return int(words[0], 0)
        except (IndexError, ValueError):
            return None

    def names(self, *parts: str) -> list[str]:
        """The sorted names in a folder; empty without it."""
        try:
            return sorted(os.listdir(self.path(*parts)))
        except OSError:
            return []

    def fields(self, *parts: str) -> dict[str, int]:
        """First word of each line (without a colon) to the whole number after it."""
        out = {}
        for line in (self.text(*parts) or "").splitlines():
            words = line.split()
            if len(words) > 1 and words[1].lstrip("-").isdigit():
                out[words[0].rstrip(":")] = int(words[1])
        return out

    def cgroups(self, controller: str) -> list[str]:
        """Folders, relative to the root, of this process's group and those around it that exist, innermost first.

        Version 2 where the controller is not mounted as version 1. In a container the path may be that of the host:
        then only the top is found.
        """
        out: list[str] = []
        for line in sorted((self.text("proc/self/cgroup") or "").splitlines(), key=lambda line: line.startswith("0:")):
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            if not controllers and out:
                continue
            top = "sys/fs/cgroup" + (f"/{controller}" if controllers else "")
            parts = [p for p in path.split("/") if p and p != ".."]
            folders = ["/".join((top, *parts[:depth])) for depth in range(len(parts), -1, -1)]
            out += [folder for folder in folders if os.path.isdir(self.path(folder))]
        return out

    def wait(self, seconds: float) -> None:
        """Let time pass between two looks."""
        time.sleep(seconds)
