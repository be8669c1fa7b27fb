"""What connects the engine with Dask's worker."""
