"""Where a task runs: `plugin` is the entry, `engine` decides, `takeover` acts on the scheduler, `tables` hold facts.

Nothing is imported here: a worker needs only one module of this package (`takeover.worker_copies`).
"""
