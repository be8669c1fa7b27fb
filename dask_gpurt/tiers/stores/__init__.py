"""Mappings on top of the engine: task results, shuffle shards."""
