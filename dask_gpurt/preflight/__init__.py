"""A worker proves itself before it works, and tells what its node is.

* `worker.Preflight`, on each worker: tells the `NodeClass`, runs the checks, and reports.
* `gate.Gate`, on the scheduler: keeps workers back until they passed, and says why one did not.
* `restrictions.ClassRestrictions`: ``annotate(gpurt={"node_class": ...})`` as restrictions of workers.
* `checks`, `known_answer`, `judge`: the checks, the computation whose answer is known, and the verdict; pure.

``gpurt.preflight`` says what becomes of a worker that fails: ``warn``, ``hold`` or ``close``. The default is
``off``: nothing is checked; each worker says what its node is all the same.

Why ``hold`` is not the default. A worker that is held comes later than its neighbours, by a second or so. Meanwhile a
shuffle that begins pins its outputs to those that are there, ``scatter`` gives up after two seconds without a running
worker, and all root tasks go to the first that passes. So holding can lose against stock Dask on a healthy cluster.
Those who start long-lived clusters on many nodes gain more from it than they lose.
"""
