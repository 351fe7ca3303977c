"""Loads what the tests share; see tests/support."""

pytest_plugins = ("tests.support.plugin",)
