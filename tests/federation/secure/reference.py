"""A slow implementation of the private round in Python's integers, written from the protocol's text alone.

It plays one small session in mode `verified` and returns every value of section 2a that goes over the wire or into a
digest. It shares no code with `federation.secure`: X25519, HKDF, the counter of AES, the fields, sharing, sketches and
masks are written out. The sketch has 16 rows instead of max(1024, 32 m).

`python tests/federation/secure/reference.py` prints the values that tests/secure_vectors.json holds.
"""

import hashlib
import hmac
import json
import math
import sys
from typing import Any

from blake3 import blake3
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB

P, Q = 2**31 - 1, 2**61 - 1
TERMS = b"the bytes of the terms"
IDS = ["Silo", "bank", "bank-2", "klinik", "école"]  # in the order of their UTF-8 bytes
SECRETS = {name: bytes([17 * i + 1]) * 32 for i, name in enumerate(IDS)}
CHALLENGE = b"\x77" * 32
D, ROWS = 24, 16
T, T_MASK, N_MIN = 1, 4, 4
BLUR = 1.0
COEFFICIENTS = [2**32 // 5, 2**30, -(2**28), 2**32 // 7, 2**29 + 12345]
LOST = "bank-2"  # at MASK


def update(i: int) -> list[float]:
    """A vector of length 1 or less; its values are exact in float64."""
    return [((37 * (j + 3) * (i + 2)) % 101 - 50) / 512 for j in range(D)]


# --- section 2a


def H(*parts: bytes) -> bytes:  # noqa: N802 - its name in the text
    return blake3(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


def number(n: int) -> bytes:
    return (n % 2**64).to_bytes(8, "big")


def list_of(elements: list[bytes]) -> list[bytes]:
    return [number(len(elements)), *elements]


def names(ids: list[str]) -> list[bytes]:
    return list_of([name.encode() for name in ids])


def kdf(secret: bytes, label: str, *context: bytes) -> bytes:
    info = b"fedpareto/v1/secure/" + label.encode() + b"\x00" + H(*context)
    key = hmac.new(bytes(32), secret, hashlib.sha256).digest()
    return hmac.new(key, info + b"\x01", hashlib.sha256).digest()


def failed_direction(secret: bytes, session: bytes) -> list[int]:
    """Four coordinates of the direction after a failed computation, before the factor sqrt(3) / 2^32."""
    stream = Bytes(kdf(secret, "failed", session))
    return [sum(stream.word(4) for _ in range(4)) - 2 * (2**32 - 1) for _ in range(4)]


def evaluation_noise(secret: bytes, view_mask: bytes) -> list[int]:
    """Four values of a member's noise on an evaluation, in units of 2^-28; quantiles are found by halving."""
    stream, found = Bytes(kdf(secret, "evaluation", view_mask)), []
    for _ in range(4):
        share = (stream.word(8) % 2**52 + 0.5) / 2**52
        low, high = -40.0, 40.0
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if math.erfc(-middle / math.sqrt(2)) / 2 < share else (low, middle)
        found.append(round(low * 2**28))
    return found


def normal(secret: bytes, view1: bytes) -> list[float]:
    """The noise of a member's blur, one number for each coordinate."""
    stream = Bytes(kdf(secret, "blur", view1))
    return [(sum(stream.word(4) for _ in range(4)) - 2 * (2**32 - 1)) * (math.sqrt(3) / 2**32) for _ in range(D)]


def blurred(u: list[float], z: list[float]) -> tuple[list[float], list[float]]:
    """The vector of a member that is blurred, as long as u, and its direction of length 1."""
    size = BLUR / math.sqrt(N_MIN - T)
    b = [x * (1 + size * noise) for x, noise in zip(u, z, strict=True)]
    before, after = (math.sqrt(math.fsum(x * x for x in vector)) for vector in (u, b))
    return [x * (before / after) for x in b], [x / after for x in b]


class Bytes:
    """AES-256-CTR from a zero counter block."""

    def __init__(self, key: bytes) -> None:
        self.cipher, self.counter, self.left = Cipher(AES(key), ECB()).encryptor(), 0, b""

    def take(self, count: int) -> bytes:
        while len(self.left) < count:
            self.left += self.cipher.update(self.counter.to_bytes(16, "big"))
            self.counter += 1
        taken, self.left = self.left[:count], self.left[count:]
        return taken

    def word(self, width: int) -> int:
        value: int = int.from_bytes(self.take(width), "little")
        return value

    def element(self, p: int) -> int:
        while True:
            value = self.word(4 if p == P else 8) % (p + 1)
            if value != p:
                return value

    def elements(self, p: int, count: int) -> list[int]:
        return [self.element(p) for _ in range(count)]

    def centred(self, bound: int) -> int:
        while True:
            value = self.word(4) % 2 ** (2 * bound).bit_length()
            if value <= 2 * bound:
                return int(value) - bound


def packed(p: int, elements: list[int]) -> bytes:
    return b"".join(x.to_bytes(4 if p == P else 8, "little") for x in elements)


def x25519(scalar: bytes, point: bytes) -> bytes:
    """RFC 7748, section 5."""
    p = 2**255 - 19
    k = int.from_bytes(bytes([scalar[0] & 248, *scalar[1:31], scalar[31] & 127 | 64]), "little")
    u = int.from_bytes(point, "little") % 2**255
    x2, z2, x3, z3, swap = 1, 0, u, 1, 0
    for t in reversed(range(255)):
        bit = k >> t & 1
        if swap ^ bit:
            x2, x3, z2, z3 = x3, x2, z3, z2
        swap = bit
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        da, cb = d * a, c * b
        x3, z3 = (da + cb) ** 2 % p, u * (da - cb) ** 2 % p
        aa, bb = a * a % p, b * b % p
        e = aa - bb
        x2, z2 = aa * bb % p, e * (aa + 121665 * e) % p
    if swap:
        x2, z2 = x3, z3
    return (x2 * pow(z2, p - 2, p) % p).to_bytes(32, "little")


def public(scalar: bytes) -> bytes:
    return x25519(scalar, (9).to_bytes(32, "little"))


# --- arithmetic


def shared(p: int, secrets: list[int], degree: int, points: list[int], stream: Bytes) -> list[list[int]]:
    """A row for each point."""
    rows = [secrets, *([stream.element(p) for _ in secrets] for _ in range(degree))]
    return [[sum(c[r] * x**power for power, c in enumerate(rows)) % p for r in range(len(secrets))] for x in points]


def weight(p: int, points: list[int], i: int) -> int:
    """The Lagrange weight at 0."""
    top = bottom = 1
    for j, x in enumerate(points):
        if j != i:
            top, bottom = top * -x, bottom * (points[i] - x)
    return top * pow(bottom, -1, p) % p


def sketch(seed: bytes, v: list[float], rows: int) -> list[int]:
    """2^24 sqrt(4 k) times the sketch."""
    table, count, dense = [0] * 16384, Bytes(kdf(seed, "count")), Bytes(kdf(seed, "dense"))
    for x in v:
        q, word = round(x * 2**24), count.word(8)
        for b in range(4):
            bits = word >> 13 * b
            table[4096 * b + bits % 4096] += -q if bits >> 12 & 1 else q
    places = [place for place, value in enumerate(table) if value]
    sums = []
    for _ in range(rows):
        row = dense.take(2048)
        sums.append(sum(-table[j] if row[j // 8] >> (7 - j % 8) & 1 else table[j] for j in places))
    return sums


# --- the session


def vectors() -> dict[str, Any]:
    """The values, digests and payloads in hexadecimal."""
    out: dict[str, Any] = {}
    x = {name: i + 1 for i, name in enumerate(IDS)}
    session = H(b"session", TERMS)
    out["H"] = [H().hex(), H(b"").hex(), H(b"ab", b"").hex(), H(b"a", number(-2), *list_of([b"x", b"yz"])).hex()]
    out["session"] = session.hex()

    # READY
    c = {name: kdf(SECRETS[name], "c", session) for name in IDS}
    sigma_b = {name: Bytes(kdf(SECRETS[name], "sigma-b", session)).elements(Q, 5) for name in IDS}
    sigma_s = {name: Bytes(kdf(SECRETS[name], "sigma-s", session)).elements(Q, 5) for name in IDS}
    s = {name: kdf(packed(Q, sigma_s[name]), "pair-key", session) for name in IDS}
    C, S = {name: public(c[name]) for name in IDS}, {name: public(s[name]) for name in IDS}
    out["keys"] = {name: {"c": C[name].hex(), "s": S[name].hex()} for name in IDS}
    out["sigma"] = {name: [packed(Q, sigma_b[name]).hex(), packed(Q, sigma_s[name]).hex()] for name in IDS}
    out["training"] = kdf(SECRETS["bank"], "training", session).hex()
    view1 = H(b"view1", session, *names(IDS), *(key for name in IDS for key in (C[name], S[name])))
    out["view1"] = view1.hex()

    # DEAL
    z = {name: normal(SECRETS[name], view1) for name in IDS}
    out["blur"] = {name: [round(number * 2**28) for number in z[name][:4]] for name in IDS}
    used, directions = {}, {}
    for i, name in enumerate(IDS):
        used[name], directions[name] = blurred(update(i), z[name])
    out["blurred"] = {name: [round(value * 2**40) for value in used[name]] for name in IDS}
    out["commitments"] = {
        name: blake3(b"fedpareto/v1/secure/commit" + packed(Q, sigma_b[name])).hexdigest() for name in IDS
    }
    sketches, held = {}, {}
    for name in IDS:
        sums = sketch(session, directions[name], ROWS)
        length = math.sqrt(sum(value**2 for value in sums))
        sketches[name] = [round(value / length * 2**14) for value in sums]
        stream = Bytes(kdf(SECRETS[name], "shares", view1))
        masks = shared(Q, sigma_b[name] + sigma_s[name], T_MASK - 1, list(x.values()), stream)
        parts = shared(P, [value % P for value in sketches[name]], T, list(x.values()), stream)
        held[name] = [(mask[:5], mask[5:], part) for mask, part in zip(masks, parts, strict=True)]
    out["sketches"] = sketches
    plain = {
        (name, other): packed(Q, held[name][x[other] - 1][0] + held[name][x[other] - 1][1])
        + packed(P, held[name][x[other] - 1][2])
        for name in IDS
        for other in IDS
    }
    out["deal"] = {
        name: b"".join(
            ChaCha20Poly1305(kdf(x25519(c[name], C[other]), "deal", view1, name.encode(), other.encode())).encrypt(
                bytes(12), plain[name, other], view1
            )
            for other in IDS
            if other != name
        ).hex()
        for name in IDS
    }

    # OPEN
    out["view_open"] = [H(b"open", view1, number(opening), *names(IDS)).hex() for opening in range(3)]
    pairs = [(a, b) for i, a in enumerate(IDS) for b in IDS[i:]]
    bound = math.isqrt(3 * 2**52 // (ROWS * len(IDS)))
    out["noise bound"] = bound
    out["open"], total = {}, [[0] * len(pairs), [0] * len(pairs)]
    for opening in (1, 2):
        view = H(b"open", view1, number(opening), *names(IDS))
        for i, name in enumerate(IDS):
            factor, noise = weight(P, list(x.values()), i), Bytes(kdf(SECRETS[name], "noise", view))
            elements = []
            for a, b in pairs:
                product = sum(f * g for f, g in zip(held[a][i][2], held[b][i][2], strict=True))
                elements.append(factor * product + noise.centred(bound))
            for other in IDS:
                if other != name:
                    smaller, larger = sorted([name.encode(), other.encode()])
                    stream = Bytes(kdf(x25519(c[name], C[other]), "open", view, smaller, larger))
                    sign = 1 if name.encode() == smaller else -1
                    elements = [element + sign * stream.element(P) for element in elements]
            elements = [element % P for element in elements]
            out["open"][f"{name} {opening}"] = packed(P, elements).hex()
            total[opening - 1] = [(a + b) % P for a, b in zip(total[opening - 1], elements, strict=True)]
    out["gram"] = [[value - P if value > P // 2 else value for value in elements] for elements in total]

    # MASK
    view_mask = H(b"mask", view1, *names(IDS), *list_of([number(a) for a in COEFFICIENTS]))
    out["view_mask"] = view_mask.hex()
    y = {}
    for i, name in enumerate(IDS):
        words = [round(value * (COEFFICIENTS[i] / 2**32) * 2**28) for value in used[name]]
        stream = Bytes(kdf(packed(Q, sigma_b[name]), "self-mask", view_mask))
        words = [word + stream.word(4) for word in words]
        for other in IDS:
            if other != name:
                smaller, larger = sorted([name.encode(), other.encode()])
                stream = Bytes(kdf(x25519(s[name], S[other]), "pair-mask", view_mask, smaller, larger))
                sign = 1 if name.encode() == smaller else -1
                words = [word + sign * stream.word(4) for word in words]
        y[name] = b"".join((word % 2**32).to_bytes(4, "little") for word in words)
    out["mask"] = {name: data.hex() for name, data in y.items()}
    out["evaluation noise"] = {name: evaluation_noise(SECRETS[name], view_mask) for name in IDS}

    # CONFIRM
    V = [name for name in IDS if name != LOST]
    inputs = [blake3(y[name]).digest() for name in V]
    tau1, tau2 = (kdf(CHALLENGE, tau, view_mask, *names(V), *list_of(inputs)) for tau in ("tau1", "tau2"))
    out["tau"] = [tau1.hex(), tau2.hex()]
    final = H(b"final", view_mask, *names(V), *list_of(inputs), tau1, blake3(tau2).digest())
    out["final"] = [final.hex(), H(b"final", view_mask, *names(V), *list_of(inputs), b"", b"").hex()]
    points = [x[name] for name in V]
    second, check = {}, {}
    for name in V:
        sums = sketch(tau1, used[name], 256)
        second[name] = [round(value / 2**29 * 2**16) for value in sums]
        stream = Bytes(kdf(SECRETS[name], "check-shares", final))
        blocks = [
            shared(Q, [value % Q for value in second[name]], T, points, stream),
            shared(Q, [0], 2 * T, points, stream),
            shared(Q, [stream.element(Q)], T, points, stream),
            shared(Q, [0], 2 * T, points, stream),
            shared(Q, [stream.centred(2**24) % Q for _ in range(32)], T, points, stream),
        ]
        check[name] = [[value for block in blocks for value in block[i]] for i in range(len(V))]
    out["second sketch"] = {name: values[:4] for name, values in second.items()}
    out["confirm"] = {
        f"{name} {other}": blake3(
            ChaCha20Poly1305(kdf(x25519(c[name], C[other]), "deal-T", final, name.encode(), other.encode())).encrypt(
                bytes(12), packed(Q, check[name][V.index(other)]), final
            )
        ).hexdigest()
        for name in V
        for other in V
        if other != name
    }

    # UNMASK
    stream = Bytes(kdf(tau2, "challenge"))
    rho, factor = stream.elements(Q, 256), stream.element(Q)
    bits = [byte >> (7 - place) & 1 for byte in stream.take(2048) for place in range(8)]
    signs = [[bits[2 * j] - bits[2 * j + 1] for j in range(256 * row, 256 * row + 256)] for row in range(32)]
    out["challenge"] = [blake3(packed(Q, rho)).hexdigest(), factor, signs[31][-16:]]
    out["unmask"] = {}
    for i, name in enumerate(V):
        place = x[name] - 1
        elements = [value for other in V for value in held[other][place][0]] + held[LOST][place][1]
        rows = [check[other][i] for other in V]
        elements += [(sum(v * v for v in row[:256]) + row[256]) % Q for row in rows]
        elements += [(sum(r * v for r, v in zip(rho, row[:256], strict=True)) + row[257]) % Q for row in rows]
        elements += [(factor * row[256] + row[258]) % Q for row in rows]
        for row in rows:
            for row_of_signs, sum_ in zip(signs, row[259:], strict=True):
                elements.append((sum(r * v for r, v in zip(row_of_signs, row[:256], strict=True)) + sum_) % Q)
        scales = [COEFFICIENTS[IDS.index(other)] for other in V]
        elements += [sum(a * row[r] for a, row in zip(scales, rows, strict=True)) % Q for r in range(256)]
        payload = packed(Q, elements)
        out["unmask"][name] = [payload[: 8 * 37].hex(), blake3(payload).hexdigest()]
    out["sum"] = [
        sum(round(used[name][j] * (COEFFICIENTS[IDS.index(name)] / 2**32) * 2**28) for name in V) for j in range(D)
    ]
    return out


if __name__ == "__main__":
    json.dump(vectors(), sys.stdout, indent=1, ensure_ascii=False)
    print()
