"""Secret tokens of ordered consumers (R28).

A client id is a name that a user gives: it proves nothing, and two processes may have the same. What a consumer had
before a lost connection, or before a restart of the broker, is its own again if it shows the token that it made then.
"""

from __future__ import annotations

from hashlib import blake2b


def proof_of(token: int) -> int:
    """What the broker keeps of a token, in its logs too, from which the token cannot be found; 0 of none."""
    return int.from_bytes(blake2b(b"%d" % token, digest_size=7).digest(), "little") if token else 0


def proves(token: int, proof: int) -> bool:
    """The token is the one that the proof was made of; none proves nothing."""
    return proof != 0 and proof_of(token) == proof
