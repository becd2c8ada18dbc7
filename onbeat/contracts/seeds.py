"""Seeds that are the same wherever and whenever they are made, and different for each place in a job."""

import hashlib


def seed_of(*place: int | str) -> int:
    """Return a seed of 31 bits, which fits every generator that an engine may use."""
    digest = hashlib.sha256("/".join(map(str, place)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
