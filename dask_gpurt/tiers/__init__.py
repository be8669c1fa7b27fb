"""Where data lives: host memory, then disk. `TieredStore` stands in for ``worker.data``."""
