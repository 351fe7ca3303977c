"""partitions."""
