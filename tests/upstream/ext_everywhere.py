"""pytest plugin: every cluster that a test suite starts loads the extension as a preload, tests unedited.

A server reads its preloads from ``dask.config`` when it is made. Three places must be set:

1. the environment, for child processes (Nanny workers, ``cluster()``, ``dask worker`` commands);
2. ``dask.config``, for this process: pytest resolves the ini file's ``filterwarnings`` before it loads ``-p``
   plugins, one of these names a class of distributed, so distributed has read the environment already;
3. the ``defaults`` of the module ``distributed.config``: the TLS fixtures go back to them. (The *attribute*
   ``distributed.config`` is the configuration, hence the look into ``sys.modules``.)

All three before ``distributed.utils_test`` is imported, which keeps a copy of the configuration and resets to it
after every test. So this plugin must be the first ``-p`` of the command line; a late load is an error, not a silent
stock run.

Not reached, by design of upstream: worker state machines without a server (``ws`` fixture) and an explicit ``preload=``
argument, which replaces the configuration.

Settings (environment): ``UPSTREAM_EXTENSION``, the module; ``UPSTREAM_ROLES``, default ``scheduler,worker``.
"""

from __future__ import annotations

import json
import os
import sys

if "distributed.utils_test" in sys.modules:
    raise ImportError(
        "ext_everywhere was loaded after distributed.utils_test, which has copied a plain configuration; "
        "give it as the first -p option of pytest"
    )

ROLES = [r.strip() for r in os.environ.get("UPSTREAM_ROLES", "scheduler,worker").split(",") if r.strip()]
PRELOADS = [f"{__package__}.active", os.environ["UPSTREAM_EXTENSION"]]

for _role in ROLES:
    os.environ[f"DASK_DISTRIBUTED__{_role.upper()}__PRELOAD"] = json.dumps(PRELOADS)

import dask  # noqa: E402
import distributed  # noqa: E402, F401  # its import fills sys.modules["distributed.config"]

_defaults = sys.modules["distributed.config"].defaults
for _role in ROLES:
    dask.config.set({f"distributed.{_role}.preload": list(PRELOADS)})
    _defaults["distributed"][_role]["preload"] = list(PRELOADS)
