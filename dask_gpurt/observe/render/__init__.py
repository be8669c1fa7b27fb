"""Text and HTML of answers and reports."""
