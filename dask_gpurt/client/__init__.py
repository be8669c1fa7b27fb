"""What a user's process does with a cluster: start it, attach to it, ask it, record it, report on it."""
