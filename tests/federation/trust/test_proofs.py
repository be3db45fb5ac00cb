import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.trust import proofs
from federation.trust.keys import IdentityError


def test_points_of_small_order_are_no_signing_keys() -> None:
    # Found by arithmetic, not copied: 8 P is the neutral element, for every point of that kind and its encodings.
    p, one = 2**255 - 19, 1
    d = -121665 * pow(121666, -1, p) % p

    def add(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        (x1, y1), (x2, y2) = a, b
        t = d * x1 * x2 * y1 * y2 % p
        return (x1 * y2 + x2 * y1) * pow(1 + t, -1, p) % p, (y1 * y2 + x1 * x2) * pow(1 - t, -1, p) % p

    def order_divides_8(point: tuple[int, int]) -> bool:
        for _ in range(3):
            point = add(point, point)
        return point == (0, one)

    def decode(raw: bytes) -> tuple[int, int] | None:
        y = (int.from_bytes(raw, "little") & (2**255 - 1)) % p
        square = (y * y - 1) * pow(d * y * y + 1, -1, p) % p
        for x in (pow(square, (p + 3) // 8, p), pow(square, (p + 3) // 8, p) * pow(2, (p - 1) // 4, p) % p):
            if x * x % p == square:
                return x, y
        return None

    for encoding in (
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
    ):
        raw = bytes.fromhex(encoding)
        point = decode(raw)
        assert point is not None
        assert order_divides_8(point)
        for key in (raw, raw[:31] + bytes([raw[31] | 0x80])):
            with pytest.raises(IdentityError):
                proofs.signing_public_key(key)
    with pytest.raises(IdentityError, match="small order"):
        proofs.signing_public_key(proofs.UNSIGNED)
    assert proofs.signing_public_key(Ed25519PrivateKey.generate().public_key().public_bytes_raw())
    with pytest.raises(IdentityError, match="31"):
        proofs.signing_public_key(b"\x05" * 31)


def test_a_proof_holds_for_its_key_its_purpose_and_what_it_signs_alone() -> None:
    key, other, secret, csr = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate(), b"s" * 32, b"request"
    possession, renewal = proofs.prove_possession(key, secret, csr), proofs.prove_renewal(key, csr)
    assert proofs.proves_possession(key.public_key(), possession, secret, csr)
    assert proofs.proves_renewal(key.public_key(), renewal, csr)
    assert not proofs.proves_possession(other.public_key(), possession, secret, csr)
    assert not proofs.proves_possession(key.public_key(), possession, b"t" * 32, csr)
    assert not proofs.proves_possession(key.public_key(), possession, secret, b"another")
    assert not proofs.proves_possession(key.public_key(), renewal, b"", csr)
    assert not proofs.proves_renewal(other.public_key(), renewal, csr)
    assert not proofs.proves_renewal(key.public_key(), renewal, b"another")
    assert not proofs.proves_renewal(key.public_key(), proofs.prove_possession(key, b"", csr), csr)
