"""Values in an object store."""
