"""Stages: rows of a batch that are invisible until it is committed."""
