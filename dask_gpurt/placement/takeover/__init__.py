"""The only code of placement that changes how the Scheduler behaves."""
