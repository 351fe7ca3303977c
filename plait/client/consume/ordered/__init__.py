"""ordered."""
