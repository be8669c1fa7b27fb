"""Messages over UCX."""
