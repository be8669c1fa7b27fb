"""The part of a shuffle that runs on a worker."""
