"""Shared helpers of the tests: requirements on the machine, the leak check, the state of long runs, and harnesses."""
