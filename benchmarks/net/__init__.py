"""Two racks on one machine: network namespaces joined by a slow wire."""
