"""`known_as`: the address by which the scheduler knows a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Worker


async def known_as(worker: Worker) -> str | None:
    """The address of a worker in all that the scheduler says; None: the scheduler does not know it any more.

    It differs from the worker's own where ``--contact-address`` has the name of a host, or no protocol: the scheduler
    resolves it. It is asked, as a name may stand for another address here: that of a host itself often is 127.0.1.1.
    """
    known = await worker.scheduler.ncores(workers=[worker.contact_address or worker.address])
    return next(iter(known), None)
