"""The sum of a private session of the mode "sum", from docs/reference/private-protocol.md, sections 1, 2 and 2a.

The sum is that of the members' masked words, less the masks that the members' shares give.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from federation.v1 import secure_pb2

PRIME = 2**61 - 1
STAGES = ("ready", "deal", "open", "mask", "confirm", "unmask")


class NoSum(Exception):
    """No sum follows from the replies."""


def must(holds: object, what: str) -> None:
    if not holds:
        raise NoSum(what)


@dataclass(frozen=True)
class Answer:
    """An accepted reply to a phase of a session.

    Attributes:
        name: of the member.
        stage: one of STAGES.
        digest: of the reply's envelope.
        work: of the assignment.
        statement: a serialized SecureStatement.
        payload: the bytes of its tensor, (n,) uint8; None without one, and for ciphertexts, which are not kept.
        payload_digest: of the file.
    """

    name: str
    stage: str
    digest: str
    work: bytes
    statement: bytes
    payload: np.ndarray | None
    payload_digest: str

    @property
    def said(self) -> Any:
        return secure_pb2.SecureStatement.FromString(self.statement)

    @property
    def asked(self) -> Any:
        kind = getattr(secure_pb2, f"Secure{self.stage.title()}Work")
        return kind.FromString(self.work)


@dataclass(frozen=True)
class Sum:
    """What a session has summed.

    Attributes:
        terms: a serialized SecureTerms.
        ready: the members that were ready, sorted.
        agreed: W, the members that accepted their shares, sorted.
        members: V, whose vectors are in the sum, sorted.
        replies: the digests of their replies to MASK, in this order.
        total: the sum of their words, (n,) uint32 or uint64.
    """

    terms: bytes
    ready: list[str]
    agreed: list[str]
    members: list[str]
    replies: list[str]
    total: np.ndarray


def hashed(*parts: bytes) -> bytes:
    return blake3(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


def part(value: str | bytes | int) -> bytes:
    """A part of what is hashed."""
    if isinstance(value, int):
        return value.to_bytes(8, "big", signed=True)
    return value.encode() if isinstance(value, str) else value


def listed(values: Sequence[str] | Sequence[bytes] | Sequence[int]) -> list[bytes]:
    return [part(len(values)), *map(part, values)]


def words(key: bytes, count: int, word: str = "<u4") -> np.ndarray:
    """A stream: AES-256-CTR from a zero counter block, as words."""
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(np.dtype(word).itemsize * count)), word)


def derived(secret: bytes, label: str, *context: bytes) -> bytes:
    info = f"fedpareto/v1/secure/{label}".encode() + b"\0" + hashed(*context)
    return HKDF(SHA256(), 32, None, info).derive(secret)


def secret(shares: Mapping[int, Sequence[int]], needed: int) -> bytes:
    """The secret of five elements of F_q, from the shares of the first members, by their points."""
    must(len(shares) >= needed, "too few shares")
    points, value = sorted(shares)[:needed], []
    for place in range(5):
        total = 0
        for x in points:
            weight = 1
            for other in points:
                if other != x:
                    weight = weight * other * pow(other - x, -1, PRIME) % PRIME
            total += weight * shares[x][place]
        value.append(total % PRIME)
    return b"".join(one.to_bytes(8, "little") for one in value)


def by_bytes(names: Iterable[str]) -> list[str]:
    return sorted(names, key=str.encode)


def accepting(dealt: Sequence[str], answers: Mapping[str, Answer], t: int) -> list[str]:
    """The members W that are left after opening 0."""
    accused = {name: {*answer.said.complaints} for name, answer in answers.items()}
    left = {name for name in dealt if name in accused}
    left -= {name for name in left if sum(name in of for of in accused.values()) > t}
    left -= {name for name in left if len(accused[name]) > t}
    for accuser, of in sorted((a, b) for a in left for b in accused[a]):
        if accuser in left and of in left:
            left -= {accuser, of}
    return by_bytes(left)


def unmasked(answers: Sequence[Answer], word: str, coefficient: Callable[[int], int]) -> Sum:
    """The sum of a session, from all accepted replies to its phases, each share of which is right.

    Args:
        answers: the replies.
        word: the type of the words.
        coefficient: of each member, by the number of members in W.

    Raises:
        NoSum: something does not follow.
        LookupError: a payload is absent.
    """
    by: dict[str, dict[str, Answer]] = {stage: {} for stage in STAGES}
    for answer in answers:
        must(by[answer.stage].setdefault(answer.name, answer) is answer, "two replies to one phase")
    agreed = {answer.asked.terms for answer in by["ready"].values()}
    must(len(agreed) == 1, "the terms of the session")
    (terms,) = agreed
    session, ready = hashed(b"session", terms), by_bytes(by["ready"])
    m = len(ready)
    t, needed = (m - 1) // 3, 2 * m // 3 + 1
    must(m >= 5, "the number of members")
    keys = {name: by["ready"][name].said.keys for name in ready}
    halves = [key[place : place + 32] for key in keys.values() for place in (0, 32)]
    must(all(len(half) == 32 for half in halves) and len({*halves}) == 2 * m, "the members' keys")

    dealt = by_bytes(by["deal"])
    view = {"ready": b"", "deal": hashed(b"view1", session, *listed(ready), *halves)}
    view["open"] = hashed(b"open", view["deal"], part(0), *listed(dealt))
    W, V = accepting(dealt, by["open"], t), by_bytes(by["mask"])
    numbers = [coefficient(len(W))] * len(W)
    view["mask"] = hashed(b"mask", view["deal"], *listed(W), *listed(numbers))
    masked = [bytes.fromhex(by["mask"][name].payload_digest.partition(":")[2]) for name in V]
    view["confirm"] = view["unmask"] = hashed(b"final", view["mask"], *listed(V), *listed(masked), b"", b"")
    must({*V} <= {*W} and len(V) >= needed, "the members whose vectors are in the sum")
    must(len(by["confirm"]) >= needed and {*by["confirm"], *by["unmask"]} <= {*V}, "the confirmations")
    lost = [name for name in W if name not in V]
    for answer in answers:
        said, asked = answer.said, answer.asked
        named = (said.session, said.stage, said.opening, said.view)
        must(named == (session, f"secure-{answer.stage}", 0, view[answer.stage]), f"the statement of {answer.name}")
        must(answer.stage == "ready" or asked.session == session, f"the session of {answer.name}")
        expected = {"deal": ready, "open": dealt, "mask": W, "confirm": V, "unmask": V}.get(answer.stage)
        must(expected is None or [*asked.members] == expected, f"the members that {answer.name} was told")
        must(answer.stage != "mask" or [*asked.coefficients] == numbers, "the coefficients")
        must(answer.stage != "confirm" or [*asked.masked] == masked, "the masked vectors")
        must(answer.stage != "unmask" or [*asked.lost] == lost, "the members that are lost")

    vectors = [payload(by["mask"][name]).view(word) for name in V]
    must(len({len(vector) for vector in vectors}) == 1, "the lengths of the masked vectors")
    total = np.sum(vectors, axis=0, dtype=word)
    shares: dict[str, dict[int, list[int]]] = {}
    for name, answer in by["unmask"].items():
        told = payload(answer).view("<u8").reshape(-1, 5)
        must(len(told) == len(W), f"the shares of {name}")
        for of, share in zip((*V, *lost), told.tolist(), strict=True):
            shares.setdefault(of, {})[ready.index(name) + 1] = share
    for name in V:
        sigma = secret(shares[name], needed)
        committed = blake3(b"fedpareto/v1/secure/commit" + sigma).digest()
        must(committed == by["deal"][name].said.commitment, "a mask secret")
        total = total - words(derived(sigma, "self-mask", view["mask"]), len(total), word)
    for name in lost:
        private = X25519PrivateKey.from_private_bytes(derived(secret(shares[name], needed), "pair-key", session))
        must(private.public_key().public_bytes_raw() == keys[name][32:], "the key of a lost member")
        for other in V:
            common = private.exchange(X25519PublicKey.from_public_bytes(keys[other][32:]))
            first, second = by_bytes((name, other))
            mask = words(derived(common, "pair-mask", view["mask"], first.encode(), second.encode()), len(total), word)
            total = total - mask if first == other else total + mask
    return Sum(terms, ready, W, V, [by["mask"][name].digest for name in V], total)


def payload(answer: Answer) -> np.ndarray:
    if answer.payload is None:
        raise LookupError(answer.payload_digest)
    return answer.payload
