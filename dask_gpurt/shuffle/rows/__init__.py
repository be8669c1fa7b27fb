"""Rows on their way: split, packed, gathered, assembled. Pure."""
