"""What is counted while work runs: stalls, transfers, waits."""
