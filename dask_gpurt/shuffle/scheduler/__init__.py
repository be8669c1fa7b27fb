"""The part of a shuffle that runs on the scheduler."""
