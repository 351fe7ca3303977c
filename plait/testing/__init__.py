"""What tests need that a broker in production does not: disks that fail, from a seed."""
