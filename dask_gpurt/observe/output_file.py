"""`replaceable`: check where a file is to go, before the work whose result it will hold."""

from __future__ import annotations

import os


def replaceable(path: str | os.PathLike[str]) -> str:
    """The path as text, absolute.

    Files are written beside their place and moved there in one step. That replaces devices too, and fails on folders.

    Raises
    ------
    ValueError
        It is empty.
    IsADirectoryError
        A folder is there.
    FileExistsError
        Something is there that is no file: a device, a socket, a pipe.
    """
    text = os.fspath(path)
    if not text:
        raise ValueError("the path is '', must be that of a file. Remedy: a name such as 'run.html'")
    full = os.path.abspath(text)
    if os.path.isdir(full):
        raise IsADirectoryError(f"the path is {text!r}, which is a folder. Remedy: the name of a file in it")
    if os.path.exists(full) and not os.path.isfile(full):
        raise FileExistsError(
            f"the path is {text!r}, which is a device, a socket or a pipe. Remedy: the name of a file"
        )
    return full
