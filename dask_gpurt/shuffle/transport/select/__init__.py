"""Which transport and codec a message takes."""
