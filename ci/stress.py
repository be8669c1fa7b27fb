"""Plays random work with losses and slow messages on clusters in this process: `tests/stress/play.py`.

    python ci/stress.py FIRST [COUNT] [--repeat N] [--seconds S] [--stock] [--works a,b] [--events a,b]
                        [--set NAME=VALUE]

Prints every failure with its seed, what it did, and the end of the log; at the end what all plays together have
counted, which says what was played at all. ``--stock`` plays the same without the extension: does Dask fail as well?
``--set shuffle.join-filter=auto`` is a setting instead of the seed's. Exit: 0 when none failed, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import logging
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.stress.play import Plan, plan, play

#: lines of the log that are printed for a failure
LINES = 60


class Lines(logging.Handler):
    """The newest lines of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: collections.deque[str] = collections.deque(maxlen=LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line."""
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        self.lines.append(f"{at}.{int(record.msecs):03d} {record.name} {record.getMessage()}")


def names(text: str) -> tuple[str, ...]:
    """Names between commas."""
    return tuple(name for name in text.split(",") if name)


def setting(text: str) -> tuple[str, Any]:
    """Name and value of ``NAME=VALUE``."""
    name, _, value = text.partition("=")
    return name, yaml.safe_load(value)


def failed(seed: int, planned: Plan, stock: bool, log: Lines, counted: collections.Counter[str]) -> bool:
    """Play once; whether it failed, which is printed."""
    log.lines.clear()
    try:
        counted.update(asyncio.run(play(seed, planned, stock=stock)))
    except Exception:
        kept = "\n".join(f"    | {line[:600]}" for line in log.lines)
        sys.stdout.write(
            f"FAILED seed {seed}{' stock' if stock else ''}: {planned}\n{kept}\n{traceback.format_exc()}\n"
        )
        sys.stdout.flush()
        return True
    return False


def main() -> int:
    """See the module."""
    p = argparse.ArgumentParser(description="Random work with losses and slow messages, on clusters in this process")
    p.add_argument("first", type=int, help="seed of the first")
    p.add_argument("count", type=int, nargs="?", default=1, help="seeds, default %(default)s")
    p.add_argument("--repeat", type=int, default=1, help="how often each is played, default %(default)s")
    p.add_argument("--seconds", type=float, default=float("inf"), help="begin no more after so long")
    p.add_argument("--stock", action="store_true", help="without the extension")
    p.add_argument("--works", type=names, default=(), help="instead of the seed's")
    p.add_argument("--events", type=names, default=(), help="instead of the seed's")
    p.add_argument("--set", type=setting, action="append", default=[], help="NAME=VALUE instead of the seed's setting")
    args = p.parse_args()
    log = Lines()
    logging.getLogger("distributed").handlers = [log]
    logging.getLogger("distributed").propagate = False
    end, played, failures = time.monotonic() + args.seconds, 0, 0
    counted: collections.Counter[str] = collections.Counter()
    for seed in range(args.first, args.first + args.count):
        for _ in range(args.repeat):
            if time.monotonic() < end:
                planned = plan(seed, args.works, args.events)
                planned = planned._replace(settings={**planned.settings, **dict(args.set)})
                failures += failed(seed, planned, args.stock, log, counted)
                played += 1
    sys.stdout.write(f"{played} played, {failures} failed; {dict(counted)}\n")
    sys.stdout.flush()
    # Threads of tasks that belong to closed workers would be waited for.
    os._exit(1 if failures else 0)


if __name__ == "__main__":
    main()
