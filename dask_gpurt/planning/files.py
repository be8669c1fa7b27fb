"""Files that an expression reads: `may_hold` says whether each change of them is seen, `facts` what a name leaves out.

A name contains what Dask knows of files: sizes, times, versions. For local files and for objects in a store that is
enough. An expression that reads elsewhere is not held: some servers give no time of a file, or one to the second, and
a file that was changed looks like the one before.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

#: files of a data set above which what is known of them is not kept
MOST = 1_000
#: object stores, by pyarrow's names, and by the packages of fsspec's: they set times and versions of objects themselves
STORES = frozenset(("abfs", "gcs", "s3"))
PACKAGES = frozenset(("adlfs", "gcsfs", "s3fs"))
#: what Dask knows of a data set -> see `_changes`
_CHANGES = "_gpurt_changes"
#: nanoseconds in which an object may be written again without another time
_NEAR = 2 * 10**9


def data_set(expression: Any) -> tuple[int, int] | None:
    """What an expression knows of files: (identity of the data set, how many they are); None: it reads none."""
    known = expression.operand("_dataset_info_cache") if "_dataset_info_cache" in type(expression)._parameters else None
    if not isinstance(known, dict) or not known:
        return None
    # The two readers know the files by different names.
    data, fragments = known.get("ds"), known.get("fragments")
    files = max(len(fragments or ()), len(getattr(data, "files", ())))
    return id(fragments if data is None else data), files


def may_hold(expression: Any, known: dict[str, Any]) -> bool:
    """Whether a change of the files that an expression reads changes its name, or its `facts`."""
    if _is_of_pyarrow(expression):
        system, _ = _below(expression.fs)
        return system.type_name == "local" or system.type_name in STORES
    kind = type(known.get("fs"))
    return kind is LocalFileSystem or kind.__module__.partition(".")[0] in PACKAGES


def facts(expression: Any, known: dict[str, Any]) -> list[Any]:
    """What a name leaves out of the files that an expression reads; to be compared while both expressions are alive."""
    if _is_of_pyarrow(expression):
        # It is named by sizes and times of files, which may be the same after a column was renamed.
        schema = known["schema"]
        return [(schema, schema.metadata, _changes(known, expression.fs))]
    system = known.get("fs")
    # To fsspec, file systems of the same arguments are equal, also one whose credentials have ended.
    return [] if type(system) is LocalFileSystem else [id(system)]


def _is_of_pyarrow(expression: Any) -> bool:
    return type(expression).__name__ == "ReadParquetPyarrowFS"


def _below(system: Any) -> tuple[Any, str]:
    """The file system that has the files of a part of it, and what their paths begin with there."""
    root = ""
    while system.type_name == "subtree":
        system, root = system.base_fs, system.base_path + root
    return system, root


def _changes(known: dict[str, Any], system: Any) -> tuple[object, ...]:
    """When each file of a data set was changed; none where its name tells that. Kept with what is known of them.

    Fragments of pyarrow keep the smallest and largest values of their file. A file that was written again with the
    time of the old one, as `cp -p` and `rsync -t` do, would be left out by a filter. The time of the change of a local
    file cannot be set back. Nor can that of an object in a store, which the name has. But stores count in seconds:
    where the next time may be the same, the data set is like no other.
    """
    changes: tuple[object, ...] | None = known.get(_CHANGES)
    if changes is None:
        files = known.get("all_files", ())
        system, root = _below(system)
        changes = (object(),)
        if system.type_name == "local":
            with contextlib.suppress(OSError):  # it is gone by now
                changes = tuple((s.st_dev, s.st_ino, s.st_ctime_ns) for s in (os.stat(root + f.path) for f in files))
        else:
            latest = time.time_ns() - _NEAR
            changes = () if all((file.mtime_ns or latest) < latest for file in files) else changes
        known[_CHANGES] = changes
    return changes
