"""A run of a cluster, written down: what was asked, where it ran, how long it took, what moved. See `format`."""
