"""staged."""
