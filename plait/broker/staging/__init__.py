"""staging."""
