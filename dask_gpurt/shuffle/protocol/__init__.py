"""Decisions of a shuffle that both sides make alike. Pure."""
