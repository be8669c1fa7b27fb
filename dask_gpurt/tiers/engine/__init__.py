"""Entries, their states, and what moves them between tiers."""
