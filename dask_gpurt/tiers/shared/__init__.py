"""Copies in a shared store that outlive a worker."""
