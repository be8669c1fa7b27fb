"""`replaceable`: check where a file is to go, before the work whose result it will hold. `replacing`: put it there."""

from __future__ import annotations

import contextlib
import os
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


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


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """The path of a new, empty file beside `path`, which replaces it in one step after the block.

    After an exception it is removed, and what is at `path` stays as it is.
    """
    # Of a name that no one has, and made exclusively: neither a user's file nor what a link points to is written over.
    # Not by `tempfile`: its files are the user's alone, this one is to have the permissions that the umask says.
    beside = os.path.join(os.path.dirname(os.path.abspath(path)), f".dask-gpurt-{uuid.uuid4().hex}")
    with open(beside, "x"):
        pass
    try:
        yield beside
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
