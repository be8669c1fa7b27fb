"""Memory of a process below Python: pages, arenas, what the allocator keeps."""
