"""How messages travel: one interface, one protocol, several ways."""
