"""A worker that no longer can be trusted gets no more work: what is seen of workers, and what becomes of one.

`evidence.Evidence` says who is at fault, `hold.Holds` takes a worker out and lets it in again, `scheduler.Quarantine`
joins the two, and `worker.Health` tells what a worker has seen.
"""
