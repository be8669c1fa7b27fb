"""Device memory and pinned host memory."""
