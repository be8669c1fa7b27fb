"""`Folder`: a shared folder as an object store, for ``file://`` URLs.

Files are owner-only (0600) in owner-only folders (0700): results of tasks are private. The folders above are made as
the umask says, so that several users can share one store.

No symbolic link below the root is followed, neither for reading nor for deleting, and only regular files are ever read,
listed or deleted. Each access walks from the root by descriptors, so a folder that is replaced by a link meanwhile
leads nowhere.

An object appears under its name when it is complete, by a rename. A process that is killed before leaves a file
``<name>.<8 hex digits>.part``, which `list` shows, so that a sweep finds it.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import secrets
import stat
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: parts of a name at most; what lies deeper is not ours and is not listed
DEEPEST: Final = 4
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_INNER: Final = _FOLDER | os.O_NOFOLLOW
#: O_NONBLOCK: to open a named pipe would wait for a writer
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Folder:
    """Objects are files below one folder. Thread-safe; holds no descriptor between two calls.

    Parameters
    ----------
    url
        ``file:///absolute/path``. The folder is made if it is missing.

    Raises
    ------
    ValueError
        The URL names no absolute path on this machine.
    OSError
        The folder cannot be made.
    """

    errors: tuple[type[Exception], ...] = (OSError,)
    denied: tuple[type[Exception], ...] = (PermissionError,)

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._root = unquote(parts.path)
        if parts.netloc not in ("", "localhost") or not os.path.isabs(self._root):
            raise ValueError("a file URL needs three slashes and an absolute path")
        os.makedirs(self._root, exist_ok=True)

    def put(self, name: str, views: Sequence[Any]) -> None:
        """Write buffers one after the other as one object."""
        try:
            with self._inside(name, make=True) as (fd, leaf):
                partial = f"{leaf}.{secrets.token_hex(4)}.part"
                try:
                    _write_file(fd, partial, views)
                    os.rename(partial, leaf, src_dir_fd=fd, dst_dir_fd=fd)
                except BaseException:
                    with contextlib.suppress(OSError):
                        os.unlink(partial, dir_fd=fd)
                    raise
        except FileNotFoundError as e:  # a sweep has removed the empty folder meanwhile: worth another attempt
            raise OSError(errno.EAGAIN, f"the folder of {name} is gone: {e}") from e

    def read_range(self, name: str, start: int, stop: int) -> memoryview:
        """Return bytes of an object; fewer where it ends before `stop`."""
        buffer = memoryview(bytearray(max(0, stop - start)))
        return buffer[: self.fill(name, start, [buffer])].toreadonly()

    def fill(self, name: str, start: int, buffers: Sequence[memoryview]) -> int:
        """Fill buffers with what follows `start`; return how many bytes there were."""
        done = 0
        with self._inside(name) as (fd, leaf):
            file = _open_leaf(fd, leaf)
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise FileNotFoundError(errno.ENOENT, "it is no regular file: nothing of ours is there", name)
                for buffer in buffers:
                    view = buffer.cast("B") if buffer.nbytes else buffer
                    while view.nbytes:
                        n = os.preadv(file, [view], start + done)
                        if not n:
                            return done
                        view = view[n:]
                        done += n
            finally:
                os.close(file)
        return done

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, and their folder once it is empty; those that are gone do not matter."""
        parents = set()
        for name in names:
            with contextlib.suppress(FileNotFoundError), self._inside(name) as (fd, leaf):
                if stat.S_ISREG(os.stat(leaf, dir_fd=fd, follow_symlinks=False).st_mode):
                    os.unlink(leaf, dir_fd=fd)
            parents.add(name.rpartition("/")[0])
        for parent in parents:
            if parent.count("/") == DEEPEST - 2:  # those above are shared with others
                with contextlib.suppress(OSError), self._inside(parent) as (fd, leaf):
                    os.rmdir(leaf, dir_fd=fd)

    def list(self, prefix: str) -> dict[str, datetime.datetime]:
        """Return names below a folder and when each was last written, by the clock of the file system."""
        found: dict[str, datetime.datetime] = {}
        with contextlib.suppress(FileNotFoundError), self._inside(prefix.rstrip("/") + "/x") as (fd, _):
            _walk(fd, prefix.strip("/"), found)
        return found

    def modified(self, name: str) -> datetime.datetime:
        """Return when an object was last written."""
        with self._inside(name) as (fd, leaf):
            return _when(os.stat(leaf, dir_fd=fd, follow_symlinks=False))

    @contextlib.contextmanager
    def _inside(self, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Open the folder that a name is in; its descriptor and the last part of the name."""
        *folders, leaf = name.strip("/").split("/")
        if {"", ".", ".."} & {*folders, leaf}:
            raise ValueError(f"{name!r} is no name of an object: its parts must not be empty, '.' or '..'")
        fd = os.open(self._root, _FOLDER)  # the user named it, links included
        try:
            for i, folder in enumerate(folders):
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(folder, 0o700 if i == len(folders) - 1 else 0o777, dir_fd=fd)
                inner = _open_inner(fd, folder, make=make)
                os.close(fd)
                fd = inner
            yield fd, leaf
        finally:
            os.close(fd)


def _open_inner(fd: int, name: str, *, make: bool) -> int:
    try:
        return os.open(name, _INNER, dir_fd=fd)
    except OSError as e:
        if e.errno not in (errno.ENOTDIR, errno.ELOOP) or make:
            raise
        raise FileNotFoundError(errno.ENOENT, "it is a link, or no folder: nothing of ours is there", name) from e


def _open_leaf(fd: int, name: str) -> int:
    try:
        return os.open(name, _READ, dir_fd=fd)
    except OSError as e:
        if e.errno != errno.ELOOP:
            raise
        raise FileNotFoundError(errno.ENOENT, "it is a link: nothing of ours is there", name) from e


def _write_file(fd: int, name: str, views: Sequence[Any]) -> None:
    file = os.open(name, _WRITE, 0o600, dir_fd=fd)
    try:
        for buffer in views:
            whole = memoryview(buffer)
            view = whole.cast("B") if whole.nbytes else whole
            while view.nbytes:
                view = view[os.write(file, view) :]
    finally:
        os.close(file)  # a network file system may say only here that it is full


def _walk(fd: int, name: str, found: dict[str, datetime.datetime]) -> None:
    depth = name.count("/") + 1 if name else 0
    with os.scandir(fd) as entries:
        for entry in entries:
            path = f"{name}/{entry.name}" if name else entry.name
            # Gone meanwhile, or of a user who forbids it.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                if entry.is_file(follow_symlinks=False):
                    found[path] = _when(entry.stat(follow_symlinks=False))
                elif depth < DEEPEST - 1 and entry.is_dir(follow_symlinks=False):
                    inner = os.open(entry.name, _INNER, dir_fd=fd)
                    try:
                        _walk(inner, path, found)
                    finally:
                        os.close(inner)


def _when(status: os.stat_result) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(status.st_mtime, datetime.UTC)
