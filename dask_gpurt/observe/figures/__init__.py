"""Figures: their names, how they are exported, their history."""
