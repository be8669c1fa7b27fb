"""The report of a run: facts, findings, page, charts."""
