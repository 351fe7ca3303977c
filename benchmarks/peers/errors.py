"""What can go wrong while a peer is measured."""


class PeerError(Exception):
    """A peer's server or client failed while it was being measured."""


class PeerUnavailable(PeerError):
    """A peer cannot be measured here; the message says what is missing and how to get it."""
