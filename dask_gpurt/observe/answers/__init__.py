"""What users ask about a running cluster, answered."""
