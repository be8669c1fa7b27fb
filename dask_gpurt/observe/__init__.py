"""What happened and why: status, counters, reports."""
