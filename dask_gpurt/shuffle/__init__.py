"""How partitions change place: a peer-to-peer shuffle behind the plugins named ``shuffle``."""
