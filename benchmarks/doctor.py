"""What does `dask gpurt doctor` find, and how long does it take?

A node is broken for real, one mistake at a time: by the shell in namespaces of its own (mounts, network), by limits, or
by the environment. The whole command runs in it. Two mistakes are of tasks that a cluster runs: the command asks it.
Then `doctor` and `audit` on the machine as it is, in turns.
``--other PYTHON`` is an interpreter of an environment without UCX, whose audit takes turns with this one's. Needs
unshare, and ip for the MTU.

``python -m benchmarks.doctor`` writes benchmarks/results/doctor.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

from distributed import Client

import dask_gpurt
from benchmarks.compare import turns
from benchmarks.data import RESULTS, facts, write_json

if TYPE_CHECKING:
    from collections.abc import Callable

_NET = (
    "ip link set lo up; ip link add v0 mtu 1400 type veth peer name v1 mtu 9000; ip addr add 10.9.0.1/24 dev v0; "
    "ip addr add 10.9.0.2/24 dev v1; ip link set v0 up; ip link set v1 up"
)
#: mistake -> flags of unshare, shell commands before, environment, the check that must find it
MISTAKES: dict[str, tuple[str, str, dict[str, str], str]] = {
    "spilling to a tmpfs": ("-Urm", 'mount -t tmpfs none "$FOLDER"', {}, "T11"),
    "read-only disk": ("-Urm", 'mount --bind "$FOLDER" "$FOLDER"; mount -o remount,bind,ro "$FOLDER"', {}, "T11"),
    "files of 1 MiB at most": ("", "ulimit -f 1024", {}, "T11"),
    "reserve larger than the disk": ("", "", {"DASK_GPURT__TIERS__DISK_RESERVE": "1000 TiB"}, "T11"),
    "MTU 1400 and 9000 in a subnet": ("-Urn", _NET, {}, "T12"),
    "a device that UCX lacks": ("", "", {"UCX_NET_DEVICES": "mlx5_7:1"}, "T10"),
    "300 open files": ("", "ulimit -n 300", {}, "limits"),
    "/dev/shm of 64 MiB": ("-Urm", "mount -t tmpfs -o size=64m none /dev/shm", {}, "shm"),
    "a certificate that is not there": ("", "", {"DASK_DISTRIBUTED__COMM__TLS__WORKER__CERT": "none.pem"}, "tls"),
}


def command(arguments: list[str], *, unshare: str = "", before: str = "", **env: str) -> tuple[float, Any, int]:
    """Seconds, answer and exit code of ``dask gpurt ARGUMENTS --json``."""
    script = f'{before or ":"}\nexec "$@"'
    run = [*(["unshare", unshare] if unshare else []), "sh", "-ec", script, "sh"]
    started = time.perf_counter()
    done = subprocess.run(
        [*run, *arguments, "--json"], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - started
    if not done.stdout:
        raise RuntimeError(f"{arguments} said nothing (exit code {done.returncode}): {done.stderr[-500:]}")
    return seconds, json.loads(done.stdout)["checks"], done.returncode


def _spin(i: int) -> int:
    """A second of a processor, with the interpreter's lock held."""
    until, n = time.thread_time() + 1, 0
    while time.thread_time() < until:
        n += 1
    return n


#: mistake -> function, and what each of eight tasks calls it with
TASKS: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    "tasks that sleep": (time.sleep, [1.5 + i / 1000 for i in range(8)]),
    "tasks that hold the GIL": (_spin, list(range(8))),
}


def of_tasks(doctor: list[str]) -> list[dict[str, Any]]:
    """What is said about clusters with four threads that are busy, and keep no processor busy."""
    out = []
    for name, (function, arguments) in TASKS.items():
        with (
            dask_gpurt.local_cluster(n_workers=1, threads_per_worker=4, dashboard_address=":0") as cluster,
            Client(cluster) as client,
        ):
            client.gather(client.map(function, arguments))
            seconds, checks, code = command([*doctor, cluster.scheduler_address])
        out.append(_judged(name, "T4", seconds, checks, code))
    return out


def _judged(name: str, expected: str, seconds: float, checks: list[dict[str, Any]], code: int) -> dict[str, Any]:
    bad = [c for c in checks if c["state"] in ("warn", "fail")]
    said = [c for c in bad if c["id"] == expected]
    print(f"{'found ' if said else 'MISSED'} {name}: {said[0]['found'] if said else ''} ({seconds:.1f} s)", flush=True)
    return {
        "mistake": name,
        "found": bool(said),
        "check": expected,
        "said": said[0]["found"] if said else "",
        "meaning": said[0]["meaning"] if said else "",
        "remedy": said[0]["remedy"] if said else "",
        "others": [f"{c['id']}: {c['found']}" for c in bad if c["id"] != expected],
        "exit_code": code,
        "seconds": round(seconds, 2),
    }


def mistakes(doctor: list[str]) -> list[dict[str, Any]]:
    """What is said about each."""
    out = []
    for name, (unshare, before, env, expected) in MISTAKES.items():
        with tempfile.TemporaryDirectory() as folder:
            env = {"DASK_GPURT__TIERS__DIRECTORY": folder, "FOLDER": folder, **env}
            seconds, checks, code = command(doctor, unshare=unshare, before=before, **env)
        out.append(_judged(name, expected, seconds, checks, code))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=5, help="of doctor and audit, in turns (default: 5)")
    parser.add_argument("--other", help="interpreter of an environment without UCX")
    parser.add_argument("--out", default=os.path.join(RESULTS, "doctor.json"))
    options = parser.parse_args()
    gpurt = [sys.executable, "-m", "dask", "gpurt"]
    cases = {
        "doctor": [*gpurt, "doctor"],
        "audit": [*gpurt, "audit"],
        "audit for a CPU": [*gpurt, "audit", "--backend", "cpu"],
    }
    if options.other:
        cases["audit for a CPU, without UCX"] = [options.other, *gpurt[1:], "audit", "--backend", "cpu"]
    taken: dict[str, list[float]] = {name: [] for name in cases}
    answers: dict[str, Any] = {}
    codes: dict[str, int] = {}
    for _, name in turns(list(cases), options.runs):
        seconds, answers[name], codes[name] = command(cases[name])
        taken[name].append(seconds)
    result = {
        **facts(f"{os.cpu_count()} CPU cores, no GPU: GPU checks are n/a"),
        "mistakes": [*mistakes(cases["doctor"]), *of_tasks(cases["doctor"])],
        "commands": {
            name: {
                "median_seconds": round(statistics.median(each), 2),
                "seconds": [round(s, 2) for s in each],
                "exit_code": codes[name],
                "checks": answers[name],
            }
            for name, each in taken.items()
        },
    }
    for name, all_seconds in taken.items():
        print(f"{name}: {statistics.median(all_seconds):.2f} s, exit code {codes[name]}")
    write_json(options.out, result)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
