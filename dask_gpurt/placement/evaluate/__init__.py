"""Whether decisions pay: the log of decisions, the governor of single decisions, the judge of whole graphs."""
