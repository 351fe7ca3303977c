"""Errors of a measurement of a peer."""


class PeerError(Exception):
    """A peer's server or client failed while it was being measured."""


class PeerUnavailable(PeerError):
    """A peer cannot be measured here; the message names what is missing and how to install it."""
