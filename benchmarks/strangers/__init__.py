"""A wide net: programs, patterns and random graphs that placement was not made for. See `__main__` for how to run it."""
