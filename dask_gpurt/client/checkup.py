"""`checkup`: the checks of `dask gpurt doctor` on all workers of a cluster."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from dask_gpurt.client import remote
from dask_gpurt.client.ask import ask, ask_scheduler, ask_workers, facts_of
from dask_gpurt.client.connect import ANSWER_SECONDS
from dask_gpurt.doctor.cluster import compared, grouped
from dask_gpurt.doctor.finding import Finding, State
from dask_gpurt.errors import GpurtError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distributed import Client

    from dask_gpurt.client.ask import Asked

#: of the time that workers have to answer, what the checks may take
_SHARE = 0.8


def checkup(client: Asked = None, *, timeout: float = ANSWER_SECONDS) -> list[Finding]:
    """Have each worker look at its node; what several of them say is one finding.

    A worker that does not answer is a finding.

    Parameters
    ----------
    client
        A client, a cluster, or the address of a scheduler. None: the current client, or else the address in Dask's
        configuration. With an asynchronous client or cluster the result is to be awaited.
    timeout
        Seconds that the workers have for all checks; as many before, to connect to an address.

    Raises
    ------
    NoAnswer
        The scheduler cannot be reached, or does not answer in time.
    """
    answer: list[Finding] = ask(client, checkup_of, timeout, timeout=timeout)
    return answer


async def checkup_of(client: Client, timeout: float) -> list[Finding]:
    """`checkup` with an asynchronous client."""
    started = time.monotonic()
    identity = await facts_of(client, timeout=timeout)
    workers: dict[str, dict[str, Any]] = identity["workers"]
    answers, scheduler = await asyncio.gather(_ask(client, workers, timeout), _stack_of_scheduler(client, timeout))
    seconds = time.monotonic() - started
    good = {address: answer for address, answer in answers.items() if isinstance(answer, dict)}
    silent = {address: answer for address, answer in answers.items() if address not in good}
    of_host = {id for answer in good.values() for id in answer["of_host"]}
    findings = grouped({a: [_finding(f) for f in answer["findings"]] for a, answer in good.items()}, of_host)
    facts = {address: answer["facts"] for address, answer in good.items()}
    stacks = {address: f["stack"] for address, f in facts.items()}
    if isinstance(scheduler, dict):
        stacks[identity["address"]] = scheduler
    addresses = [identity["address"], *workers, *(w["nanny"] for w in workers.values() if w.get("nanny"))]
    findings += compared(facts, stacks, addresses, seconds)
    return findings + _answers(silent, scheduler, len(workers), seconds)


async def _ask(client: Client, workers: Mapping[str, Mapping[str, Any]], timeout: float) -> dict[str, Any]:
    """The answers of all workers. One of each host makes the checks that are the same for all of them; if it is silent,
    another one that has answered does."""

    async def ask_them(some: list[str], leaders: list[str]) -> dict[str, Any]:
        seconds = _SHARE * timeout
        return await ask_workers(
            client, remote.checkup, workers=some, timeout=timeout, leaders=leaders, seconds=seconds
        )

    leaders = {w["host"]: address for address, w in workers.items()}
    answers = await ask_them(list(workers), list(leaders.values()))
    others = {
        workers[address]["host"]: address
        for address, answer in answers.items()
        if isinstance(answer, dict) and not isinstance(answers.get(leaders[workers[address]["host"]]), dict)
    }
    if others:
        again = await ask_them(list(others.values()), list(others.values()))
        answers |= {address: answer for address, answer in again.items() if isinstance(answer, dict)}
    return answers


async def _stack_of_scheduler(client: Client, timeout: float) -> dict[str, str] | GpurtError:
    try:
        versions: dict[str, str] = await ask_scheduler(client, remote.stack, timeout=timeout)
    except GpurtError as e:
        return e
    return versions


def _finding(fields: Mapping[str, Any]) -> Finding:
    return Finding(**{**fields, "state": State(fields["state"]), "workers": tuple(fields["workers"])})


def _answers(silent: Mapping[str, object], scheduler: object, n: int, seconds: float) -> list[Finding]:
    """Who answered at all."""
    name, expected = "Answers", "an answer of each"
    if not n:
        text = "there is no worker"
        remedy = "start workers, or look at the log of those that should be there"
        return [Finding("answer", name, State.WARN, text, expected, "Nothing was checked", remedy, seconds)]
    out = []
    for address, why in silent.items():
        missing = not isinstance(why, OSError)  # of which a timeout is one
        out.append(
            Finding(
                "answer",
                name,
                State.FAIL,
                f"1 of {n} workers: {address}: {type(why).__name__}: {why}",
                expected,
                "It cannot run the checks, and nothing is known about it"
                if missing
                else "It hangs, or its network does",
                "install the same version of dask-gpurt there"
                if missing
                else f"py-spy dump on its host, or end it: {address}",
                seconds,
                (address,),
            )
        )
    if isinstance(scheduler, GpurtError):
        text = f"the scheduler: {scheduler}"
        meaning = "Its versions are not compared"
        out.append(Finding("answer", name, State.WARN, text, expected, meaning, "install dask-gpurt there", seconds))
    return out or [Finding("answer", name, State.OK, f"{n} of {n} workers answered", "", "", "", seconds)]
