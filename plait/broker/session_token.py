"""Session tokens: secrets that identify ordered consumers (R28).

A client id is a name that a user chooses. It proves nothing, and two processes can have the same client id. A consumer
presents the token that it created to get back its locks and rows after a lost connection or a restart of the broker.
"""

from __future__ import annotations

from hashlib import blake2b


def proof_of(token: int) -> int:
    """The one-way hash of a token that the broker stores in memory and in its logs; 0 for no token."""
    return int.from_bytes(blake2b(b"%d" % token, digest_size=7).digest(), "little") if token else 0


def proves(token: int, proof: int) -> bool:
    """Whether the proof was made from this token. No token proves nothing."""
    return proof != 0 and proof_of(token) == proof
