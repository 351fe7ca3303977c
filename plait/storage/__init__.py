"""Logs, checkpoints and recovery on one data directory, behind one disk interface."""
