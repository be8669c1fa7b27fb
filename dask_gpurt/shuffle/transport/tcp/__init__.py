"""Messages over TCP."""
