"""Where a task should run. These modules read tables and act on nothing."""
