"""Where a task should run. Pure: it reads tables and acts on nothing."""
