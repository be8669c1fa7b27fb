"""TPC-H in plain dask.dataframe, checked against DuckDB, on stock Dask and on dask-gpurt."""
