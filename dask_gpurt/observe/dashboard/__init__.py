"""Plots for Dask's own dashboard. Nothing is imported here: see `hook` for when and where Bokeh comes in."""
