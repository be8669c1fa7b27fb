"""Where a task runs. `plugin.PlacementPlugin` is the door, `engine` decides, `takeover` acts, `tables` know.

Nothing is imported here: a worker needs one module of this package (`takeover.worker_copies`).
"""
