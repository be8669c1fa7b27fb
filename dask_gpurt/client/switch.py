"""`enable` and `disable`: a small YAML file that loads the extension in all that this user starts.

Dask's configuration has one list of preloads per kind of server, and lists do not merge. So what others preload is
repeated in our file, and what comes after it wins: files later in the alphabet, environment variables, ``--preload`` on
a command line. `enable` names the first two. The third it cannot see.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import dask.config
import yaml

from dask_gpurt.errors import ConfigError
from dask_gpurt.extension.parts import PRELOAD, PRELOADS

ROLES = ("scheduler", "worker")


def file() -> Path:
    """The file that `enable` writes: in the first directory that Dask reads for this user.

    Raises
    ------
    ConfigError
        There is none.
    """
    # Dask reads the second beside the first, and takes it when that is empty.
    folder = os.environ.get("DASK_CONFIG") or os.path.expanduser("~/.config/dask")
    if folder.startswith("~"):  # a folder of this name in the current one, to Dask
        raise ConfigError(
            f"Dask's configuration directory is {folder!r}, and there is no home directory for ~ that Dask would take. "
            "Remedy: set DASK_CONFIG to the whole path of a directory"
        )
    return Path(folder) / "gpurt-preload.yaml"


def enable() -> Path:
    """Write the file.

    Returns
    -------
    Its path.

    Raises
    ------
    ConfigError
        Something wins over it; the text says what, and what to do.
    OSError
        It cannot be written.

    Whatever is raised, an earlier file is as before.
    """
    path = file()
    if path.parent.is_file():
        raise ConfigError(
            f"DASK_CONFIG is the file {path.parent}; add there under distributed: scheduler: preload: [{PRELOAD}]"
            f" and the same under worker:, or point DASK_CONFIG to a directory"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    earlier = path.with_name(path.name + ".earlier")  # of a name that Dask does not read
    had = path.exists()
    if had:
        path.replace(earlier)
    try:
        _write(path)
    except BaseException:  # a full disk, another's file that is no YAML, Ctrl-C: a rename back needs no space
        path.unlink(missing_ok=True)
        if had:
            earlier.replace(path)
        raise
    earlier.unlink(missing_ok=True)
    return path


def _write(path: Path) -> None:
    """Write the file where there is none. Raises as `enable` does, and may leave it."""
    before = dask.config.collect()
    tree = {"distributed": {role: _with_ours(before, role) for role in ROLES}}
    path.write_text(
        "# Written by `dask gpurt enable`; `dask gpurt disable` removes it.\n" + yaml.safe_dump(tree, sort_keys=False)
    )
    after = dask.config.collect()
    for role in ROLES:
        got = _modules(after, role)
        if not set(got) & set(PRELOADS):
            raise ConfigError(
                f"{_who_sets(role)} sets distributed.{role}.preload to {got!r} and wins; add {PRELOAD} there"
            )


def disable() -> Path | None:
    """Remove the file; its path, or None where there was none. Raises as `file` does."""
    path = file()
    if not path.exists():
        return None
    path.unlink()
    return path


def _modules(config: dict[str, Any], role: str) -> list[str]:
    """The preloads of a kind of server. Dask takes one as a text, too."""
    found = dask.config.get(f"distributed.{role}.preload", None, config=config) or []
    return [found] if isinstance(found, str) else list(found)


def _with_ours(config: dict[str, Any], role: str) -> dict[str, list[Any]]:
    """What others preload, then our module; their arguments as far as each has its own."""
    modules = _modules(config, role)
    out: dict[str, list[Any]] = {"preload": [*(m for m in modules if m not in PRELOADS), PRELOAD]}
    argvs = dask.config.get(f"distributed.{role}.preload-argv", None, config=config)
    if argvs and not isinstance(argvs[0], str):
        pairs = list(zip(modules, argvs, strict=False))
        ours = [a for module, given in pairs if module in PRELOADS for a in given]
        out["preload-argv"] = [*(given for module, given in pairs if module not in PRELOADS), ours]
    return out


def _who_sets(role: str) -> str:
    """The variable, else the last file, that sets a role's preloads."""
    variable = f"DASK_DISTRIBUTED__{role.upper()}__PRELOAD"
    if variable in os.environ:
        return f"the environment variable {variable}"
    for path, tree in reversed(list(dask.config.collect_yaml(dask.config.paths, return_paths=True))):
        if path != file() and _modules(tree, role):
            return f"the configuration file {path}"
    return "another configuration"
