"""Plays random schedules of a device's memory over the stand-in: `tests/shuffle/rows/device_schedules.py`.

    python ci/device_schedules.py [--schedules 100000] [--seed 0] [--out FILE]

One process on one core, a few minutes; needs the test requirements and no GPU. Says every 10,000 how far it is, and
every fault with its seed: ``--seed N --schedules 1`` plays that one again. Exit: 0 when none was found, else 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.shuffle.rows.device_schedules import COUNTS, play

#: faults that are printed whole
SHOWN = 5


def main() -> int:
    """See the module."""
    p = argparse.ArgumentParser(description="Random schedules of a device's memory, over a stand-in")
    p.add_argument("--schedules", type=int, default=100_000, help="how many, default %(default)s")
    p.add_argument("--seed", type=int, default=0, help="of the first; the others follow it, default %(default)s")
    p.add_argument("--out", type=Path, help="file for the counts, as JSON")
    args = p.parse_args()
    if args.schedules < 1:
        p.error(f"--schedules {args.schedules}: must be at least 1")
    faults: dict[int, str] = {}
    cpu = time.process_time()
    for i in range(args.schedules):
        seed = args.seed + i
        try:
            play(seed)
        except Exception as e:
            faults[seed] = f"{type(e).__name__}: {e}"
            if len(faults) <= SHOWN:
                sys.stdout.write(f"seed {seed}:\n{traceback.format_exc()}\n")
            gc.collect()
        if (i + 1) % 10_000 == 0:
            sys.stdout.write(f"seeds {args.seed} to {seed}: {len(faults)} faults\n")
            sys.stdout.flush()
    result = {
        "exercised on": "host memory stand-in, no GPU",
        "first seed": args.seed,
        "schedules": args.schedules,
        "faults": len(faults),
        "seeds with faults": dict(list(faults.items())[:100]),
        "CPU seconds": round(time.process_time() - cpu, 1),
        **COUNTS,
    }
    text = json.dumps(result, indent=1)
    sys.stdout.write(text + "\n")
    if args.out:
        args.out.write_text(text + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
