"""A wide net: programs, patterns and random graphs that placement was not made for. How to run it: `__main__`."""
