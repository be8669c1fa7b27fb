"""Where a task runs. Pure decisions; `seam` and `plugin` act."""
