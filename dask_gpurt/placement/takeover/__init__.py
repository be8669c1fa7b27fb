"""The only code of placement that changes the Scheduler's behaviour."""
