"""Where data lives: host memory, then disk. `runtime` is the entry; `stores` has what stands in for ``worker.data``."""
