"""The only importers of vendor libraries."""
