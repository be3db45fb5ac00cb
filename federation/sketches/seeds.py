"""What a sketch draws: the same for everybody in a round, or a client's own."""

from blake3 import blake3


def shared_seed(seed: int, round_: int) -> int:
    """Of a round's shared hash, 0 to 2^63 - 1, from the run's seed and the round, from 0."""
    return _derived(f"shared\0{seed}\0{round_}")


def own_seed(seed: int, round_: int, client_id: str) -> int:
    """Of what a client draws for itself in a round, 0 to 2^63 - 1."""
    return _derived(f"own\0{seed}\0{round_}\0{client_id}")


def _derived(text: str) -> int:
    return int.from_bytes(blake3(f"fedpareto/sketch\0{text}".encode()).digest(8), "little") >> 1
