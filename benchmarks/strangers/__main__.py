"""Work that this package was not tuned for: where is our placement slower than the better of stock's two settings?

    python -m benchmarks.strangers sim --set look --workers 16 --jobs 1 [--names a,b] [--policies stock,inf,gpurt]
    python -m benchmarks.strangers live --set look [--names a,b] [--runs 3] [--out FILE]
    python -m benchmarks.strangers live --set naive --runs 5 [--out FILE]
    python -m benchmarks.strangers validate [--names k_means] [--policies stock] [--out FILE]
    python -m benchmarks.strangers list

``sim`` runs real graphs of dask (recorded with small chunks, scaled up), the patterns of Task Bench and random graphs
in the simulator. Ratios are ours to the better of stock's settings (default queuing, ``worker-saturation: inf``):
time, bytes moved, peak memory of a worker, peak of a worker to that of queuing, peak of the cluster, scheduler time per
task to stock's. The held set is run once, when an issue ends: ``--set held --issue-ends``.
"""

from __future__ import annotations

import argparse
import os

# One thread for linear algebra: chunks are tiny, and more threads than cores make it slower by far. Before numpy.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

from benchmarks.strangers import cases, live, sim, validate  # noqa: E402
from benchmarks.strangers.catalogue import PROGRAMS, SETS, set_of  # noqa: E402


def show(args: argparse.Namespace) -> None:
    """``list`` of the command line."""
    for which in SETS:
        found = cases.names(which, 0)
        print(f"{which}: {len(found)} programs and patterns, 500 random graphs")
        if which == "look":
            for name in found:
                print(f"  {PROGRAMS[name].family if name in PROGRAMS else '':12} {name}")
    print(f"random graphs: even seeds are {set_of('random-0')}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="strangers", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(required=True)
    sim.arguments(commands.add_parser("sim", help="in the simulator"))
    live.arguments(commands.add_parser("live", help="on real clusters of processes"))
    validate.arguments(commands.add_parser("validate", help="simulated against real, for programs that iterate"))
    commands.add_parser("list", help="names of the cases").set_defaults(run=show)
    args = parser.parse_args(argv)
    held = [n for n in getattr(args, "names", None) or [] if n not in live.WITH_CLIENT and set_of(n) == "held"]
    if (getattr(args, "set", "look") == "held" or held) and not args.issue_ends:
        parser.error(f"the held set {held or ''} is run only when an issue ends; then give --issue-ends")
    args.run(args)


if __name__ == "__main__":
    main()
