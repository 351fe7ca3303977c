"""consume."""
