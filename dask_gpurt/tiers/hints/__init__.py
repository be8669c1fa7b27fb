"""Next uses of values: the scheduler sends them, workers evict and read ahead by them."""
