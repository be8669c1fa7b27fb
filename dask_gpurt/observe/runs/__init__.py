"""Single runs of a cluster after the fact: followed on the scheduler, kept in bounded form, and compared."""
