"""Whether decisions paid: the log, the governor, the judge of whole graphs."""
