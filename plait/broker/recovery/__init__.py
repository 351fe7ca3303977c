"""Checkpoints of a running broker, and the start from them and the logs."""
