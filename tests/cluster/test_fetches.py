"""A fetch from a worker that has left; see `dask_gpurt.extension.fetches`."""

from distributed.utils_test import async_poll_for, gen_cluster, inc
from distributed.worker_state_machine import AcquireReplicasEvent, RemoveWorkerEvent

from dask_gpurt.extension.fetches import Fetches


def connections(worker):
    """Addresses that a worker connects to from now on."""
    asked = []
    connect = worker.rpc.connect

    async def noted(addr, *args, **kwargs):
        asked.append(addr)
        return await connect(addr, *args, **kwargs)

    worker.rpc.connect = noted
    return asked


@gen_cluster(client=True, config={"distributed.comm.timeouts.connect": "60s"})
async def test_a_fetch_that_its_peer_left_before_is_not_begun(c, s, a, b):
    x = c.submit(inc, 1, key="x", workers=[b.address])
    await x
    fetches = Fetches(a)
    fetches.install()
    asked = connections(a)
    acquire = AcquireReplicasEvent(who_has={"x": [b.address]}, nbytes={"x": 28}, stimulus_id="acquire")
    # As one batch of messages does: the fetch begins after both.
    a.handle_stimulus(acquire)
    a.handle_stimulus(RemoveWorkerEvent(worker=b.address, stimulus_id="remove"))
    assert a.state.tasks["x"].state == "flight"
    await async_poll_for(lambda: "x" not in a.state.tasks or a.state.tasks["x"].state != "flight", timeout=30)
    assert fetches.statistics() == {"spared": 1}
    assert b.address not in asked[:1]
    # The worker asks the scheduler, which knows better: the peer is there.
    await async_poll_for(lambda: a.data.get("x") == 2, timeout=30)
    fetches.uninstall()
    fetches.uninstall()
    assert "gather_dep" not in vars(a)


@gen_cluster(client=True)
async def test_what_others_wrapped_stays(c, s, a, b):
    fetches = Fetches(a)
    fetches.install()
    ours = a.gather_dep

    async def wrapped(*args, **kwargs):
        return await ours(*args, **kwargs)

    a.gather_dep = wrapped
    fetches.uninstall()
    assert a.gather_dep is wrapped
    x = c.submit(inc, 1, key="x", workers=[b.address])
    assert await c.submit(inc, x, workers=[a.address]) == 3
