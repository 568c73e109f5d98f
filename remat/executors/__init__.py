"""Who runs the two graphs of a partition."""
