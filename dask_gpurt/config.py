"""One typed `Settings`, read once from Dask's configuration.

The same names everywhere: ``gpurt.tiers.host-limit`` in YAML, ``DASK_GPURT__TIERS__HOST_LIMIT`` in the environment,
``--gpurt-tiers-host-limit`` after ``--preload dask_gpurt.preload``. What is allowed is in `config_schema`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

import dask.config
import dask.utils

from dask_gpurt.config_schema import canonical, check, flat, load, schema
from dask_gpurt.errors import ConfigError

_T = TypeVar("_T")
#: what gpurt.yaml holds: defaults, and the complete list of keys
DEFAULTS: dict[str, Any] = load("gpurt.yaml")

#: of a size. Messages cannot carry integers of more than 64 bits, so a worker with such a budget could not report it.
_MOST_BYTES = 1 << 60


def _register() -> None:
    """Put our defaults below Dask's configuration. What is no mapping stays, so that `Settings.load` refuses it."""
    found = dask.config.config.get("gpurt")
    sections = dict(found) if isinstance(found, Mapping) else {}
    dask.config.update_defaults(DEFAULTS)  # it would replace a value such as that of DASK_GPURT=1
    for name, value in sections.items():
        name = name.replace("_", "-")
        if isinstance(DEFAULTS["gpurt"].get(name), Mapping) and not isinstance(value, (Mapping, type(None))):
            dask.config.config["gpurt"][name] = value  # such as that of DASK_GPURT__TIERS=False
    if not (found is None or isinstance(found, Mapping)):
        dask.config.config["gpurt"] = found
        # Without a preload nothing is loaded that could refuse.
        warnings.warn(_no_mapping(found), stacklevel=2)


def _no_mapping(found: Any) -> str:
    return (
        f"gpurt: is {found!r}, must be a mapping of settings: neither gpurt in YAML nor DASK_GPURT is a switch. "
        "Remedy: unset it. --preload dask_gpurt.preload or `dask gpurt enable` loads the extension, and "
        "gpurt.policy: stock (DASK_GPURT__POLICY=stock) switches it off"
    )


_register()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacementSettings:
    """``gpurt.placement``."""

    enabled: bool
    #: workers compared per decision, at most
    candidates: int
    #: only record what would have been decided
    shadow: bool = False
    #: second copies of tasks that hang behind
    stragglers: bool = True
    #: steps of a partition of a data frame as one task
    fusion: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierSettings:
    """``gpurt.tiers``."""

    enabled: bool
    #: share (0, 1] of the worker's memory limit
    host_limit: float
    #: folders for spilled data, as they were given; none: the worker's local directory
    directories: tuple[str, ...]
    #: bytes per worker; None: as much as the disk has
    disk_limit: int | None
    #: bytes of free space that spilling leaves on the disk; None: see `tiers.storage.disk.quota.reserve_of`
    disk_reserve: int | None
    #: "auto", "on" or "off"
    direct_io: str
    #: "auto", "none", "lz4" or "zstd"
    codec: str
    #: URL; None: no object store
    object_store: str | None
    #: "overflow" or "first"
    object_use: str
    #: seconds of one request to it
    object_timeout: float
    #: "off", "auto" or "on", see `tiers.device.coexistence`
    device: str
    #: share (0, 1] of the device's memory
    device_limit: float
    #: bytes of page-locked host memory for what leaves the device; None: half of what values may take in host memory
    pinned_limit: int | None
    #: share [0, 1] of the host budget for values read ahead; 0: none
    prefetch: float
    #: share [0, 1] of the worker's memory limit for columns of Parquet files; 0: none
    read_cache: float
    #: the C allocator keeps what tasks free
    reuse: bool

    @property
    def folders(self) -> tuple[str, ...]:
        """`directories` on this machine: the scheduler, whose settings go to workers, may have another home."""
        return tuple(os.path.expanduser(folder) for folder in self.directories)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShuffleSettings:
    """``gpurt.shuffle``."""

    enabled: bool
    #: "auto", "rpc", "tcp" or "ucx"
    transport: str = "auto"
    #: UCX although the cluster's comms are encrypted: the shuffled data then travels in plaintext
    allow_plaintext_ucx: bool = False
    #: bytes on their way to a worker, or held there until they are stored
    receive_budget: int = 64 << 20
    #: share of a worker's memory limit for shards that were sent, kept in case their receiver is lost
    retain: float = 0.1
    #: "auto", "none", "lz4" or "zstd", between hosts
    codec: str = "auto"
    #: large outputs go to a less loaded worker once their sizes are known
    late_binding: bool = True
    #: "auto" or "off": rows that cannot match are dropped from a join's larger side
    join_filter: str = "off"
    #: frames in device memory, such as cuDF's
    device_frames: bool = False
    #: first and last port that workers listen on for rows; (0, 0): any that is free
    listen_ports: tuple[int, int] = (0, 0)

    @property
    def cut_bytes(self) -> int:
        """Rows of one input for one worker are cut to messages of about so many bytes."""
        return max(1 << 12, min(8 << 20, self.receive_budget // 8))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferSettings:
    """``gpurt.transfers``."""

    #: checksums for what workers fetch from each other
    verify: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObserveSettings:
    """``gpurt.observe``."""

    enabled: bool
    #: of one host; a number, or pattern of host, class of node or worker name -> number; None: unknown
    cost_per_hour: float | Mapping[str, float] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """``gpurt.trace``."""

    #: None: no recording
    path: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything under ``gpurt:``. Frozen and picklable: the scheduler's goes to the workers with the plugin."""

    #: "gpurt", "stock" or "package.module:Class", see `placement.policy`
    policy: str
    #: "stop" or "stock"
    on_error: str
    placement: PlacementSettings
    tiers: TierSettings
    shuffle: ShuffleSettings
    transfers: TransferSettings
    observe: ObserveSettings
    trace: TraceSettings
    #: "off", "warn", "hold" or "close", see `preflight.members.Mode`
    preflight: str = "off"
    #: modules that each worker must be able to import
    preflight_imports: tuple[str, ...] = ()
    #: "off", "alarm" or "on", see `quarantine.scheduler.Mode`
    quarantine: str = "alarm"

    @classmethod
    def load(cls, overrides: Mapping[str, Any] | None = None) -> Settings:
        """Read Dask's configuration now.

        Parameters
        ----------
        overrides
            Dotted keys to values, e.g. ``{"tiers.host-limit": 0.5}``, or nested as in YAML:
            ``{"tiers": {"host-limit": 0.5}}``; they win. ``_`` and ``-`` are the same in keys, as everywhere in Dask,
            and a leading ``gpurt.`` may be there or not.

        Raises
        ------
        ConfigError
            An unknown key or a value that is not allowed.
        """
        if not (overrides is None or isinstance(overrides, Mapping)):
            raise ConfigError(
                f"the settings are {overrides!r}, must be a mapping of keys to values, such as {{'policy': 'stock'}}"
            )
        tree = _merged(overrides or {})
        check(tree, schema()["properties"]["gpurt"], "gpurt")
        return cls(
            policy=tree["policy"],
            on_error=tree["on-error"],
            placement=_part(PlacementSettings, tree["placement"]),
            tiers=_tiers(tree["tiers"]),
            shuffle=_shuffle(tree["shuffle"]),
            transfers=_part(TransferSettings, tree["transfers"]),
            observe=_part(ObserveSettings, tree["observe"], cost_per_hour=_prices(tree["observe"]["cost-per-hour"])),
            trace=_part(TraceSettings, tree["trace"], path=_trace_path(tree["trace"]["path"])),
            # YAML takes a bare off for a boolean.
            preflight="off" if tree["preflight"] is False else tree["preflight"],
            preflight_imports=tuple(tree["preflight-imports"]),
            quarantine={True: "on", False: "off"}.get(tree["quarantine"], tree["quarantine"]),
        )


def _part(kind: type[_T], tree: Mapping[str, Any], **other: Any) -> _T:
    """One part of the settings: fields by their keys in `tree`, and those in `other` as they are there."""
    plain = {name: tree[name.replace("_", "-")] for name in kind.__annotations__ if name not in other}
    return kind(**plain, **other)


def _tiers(tree: Mapping[str, Any]) -> TierSettings:
    disk_limit = tree["disk-limit"]
    return _part(
        TierSettings,
        tree,
        host_limit=float(tree["host-limit"]),
        directories=_folders(tree["directory"]),
        disk_limit=None if disk_limit is None else _bytes(disk_limit, "gpurt.tiers.disk-limit"),
        disk_reserve=_bytes_or_auto(tree["disk-reserve"], "gpurt.tiers.disk-reserve"),
        # YAML takes a bare on or off for a boolean.
        direct_io={True: "on", False: "off"}.get(tree["direct-io"], tree["direct-io"]),
        device={True: "on", False: "off"}.get(tree["device"], tree["device"]),
        codec=tree["codec"] or "none",  # Dask makes None of "none" in an environment variable
        object_timeout=float(tree["object-timeout"]),
        device_limit=float(tree["device-limit"]),
        pinned_limit=_bytes_or_auto(tree["pinned-limit"], "gpurt.tiers.pinned-limit"),
        prefetch=float(tree["prefetch"]),
        read_cache=float(tree["read-cache"]),
        reuse=bool(tree["reuse-memory"]),
    )


def _shuffle(tree: Mapping[str, Any]) -> ShuffleSettings:
    return _part(
        ShuffleSettings,
        tree,
        receive_budget=max(1 << 16, _bytes(tree["receive-budget"], "gpurt.shuffle.receive-budget")),
        retain=float(tree["retain"]),
        codec=tree["codec"] or "none",
        join_filter="off" if tree["join-filter"] in (False, "off") else "auto",
        listen_ports=_ports(tree["listen-ports"], "gpurt.shuffle.listen-ports"),
    )


def _ports(value: Any, where: str) -> tuple[int, int]:
    """The first and the last port of ``40000``, ``"40000:40100"``, or None: (0, 0)."""
    if value is None:
        return 0, 0
    found = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", str(value).strip())
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < first <= last < 1 << 16:
        raise ConfigError(
            f"{where} is {value!r}, must be a port or a range such as '40000:40100' within 1 to 65535, or null"
        )
    return first, last


def _merged(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults, Dask's configuration over them, and `overrides` over both."""
    tree = dask.config.get("gpurt", None)
    if tree is None:  # a file with nothing below gpurt:
        tree = {}
    if not isinstance(tree, Mapping):
        raise ConfigError(_no_mapping(tree))
    for name in dask.config.config:
        if str(name).replace("_", "-").startswith("gpurt-"):
            variable = f"DASK_{str(name).upper().replace('-', '_')}"
            raise ConfigError(
                f"{name} is no setting. Remedy: unset {variable}, or write DASK_GPURT__ with two underscores, as in "
                "DASK_GPURT__POLICY=stock"
            )
    # Over the defaults: what resets Dask's configuration (distributed's own test tools do) drops ours with it.
    merged: dict[str, Any] = dask.config.merge(DEFAULTS["gpurt"], canonical(tree))
    for dotted, value in flat(overrides).items():
        node = merged
        *parents, leaf = dotted.split(".")
        for p in parents:
            below = node.setdefault(p, {})
            if not isinstance(below, dict):
                break
            node = below
        node[leaf] = value
    return merged


def _prices(value: Any) -> float | dict[str, float] | None:
    if value is None:
        return None
    prices = value if isinstance(value, dict) else {"*": value}
    for pattern, price in prices.items():
        # An integer may be larger than any float.
        if isinstance(price, bool) or not isinstance(price, (int, float)) or not 0 <= price <= sys.float_info.max:
            raise ConfigError(
                f"gpurt.observe.cost-per-hour is {price!r} for {pattern!r}, must be a number >= 0, such as 3.06, or a "
                "mapping of patterns to such numbers"
            )
    return {str(k): float(v) for k, v in value.items()} if isinstance(value, dict) else float(value)


def _folders(value: Any) -> tuple[str, ...]:
    folders = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    for folder in folders:
        if not folder.strip():  # it would be the folder that the worker was started in
            raise ConfigError(
                f"gpurt.tiers.directory is {folder!r}, must be a folder of the worker, a list of them, or null for "
                "the worker's local directory"
            )
        if "://" in str(folder):
            raise ConfigError(
                f"gpurt.tiers.directory is {folder!r}, must be a folder of the worker. Remedy: "
                "gpurt.tiers.object-store takes an address"
            )
    return folders


def _trace_path(value: str | None) -> str | None:
    if value is not None and not value.strip():
        raise ConfigError(
            f"gpurt.trace.path is {value!r}, must be that of a file on the scheduler's machine, such as 'run.trace', "
            "or null for no recording"
        )
    return value


def _bytes_or_auto(value: Any, where: str) -> int | None:
    return None if value == "auto" else _bytes(value, where, "'auto' or ")


def _bytes(value: Any, where: str, also: str = "") -> int:
    try:
        # Of an empty text Dask makes 1 byte.
        n = -1 if isinstance(value, str) and not value.strip() else int(dask.utils.parse_bytes(value))
    except (ValueError, TypeError, OverflowError):
        n = -1
    if not 0 <= n <= _MOST_BYTES:
        raise ConfigError(
            f"{where} is {value!r}, must be {also}a number of bytes >= 0 and <= 1 EiB, such as 1000000 or '200 GiB'"
        )
    return n
