"""Ordered consumer groups: locks and leases of logical partitions, cursors, deliveries, failed keys.

The broker's groups package and the broker use it. It may import what ``plait.broker.groups`` may import.
"""
