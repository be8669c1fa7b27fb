"""Next uses: told by the scheduler, used by workers for eviction and prefetch."""
