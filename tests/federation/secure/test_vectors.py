"""Known answers for all of section 2a: the package, and a second implementation in Python's integers, give the same."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federation.secure import hashing, openings, payloads, verified_mode
from federation.secure.blocks import blocks
from federation.secure.derivation import Purpose, own, taus
from federation.secure.evaluation import noise
from federation.secure.fields import F_P, F_Q
from federation.secure.sketch import second_elements
from federation.secure.streams import Stream
from federation.secure.thresholds import Mode
from federation.secure.wire import pack
from tests.federation.secure import reference
from tests.federation.secure.scene import Session, triangle

FROZEN: dict[str, Any] = json.loads((Path(__file__).parent / "secure_vectors.json").read_text())
IDS = reference.IDS
COEFFICIENTS = dict(zip(IDS, reference.COEFFICIENTS, strict=True))


@cache
def independent() -> dict[str, Any]:
    return reference.vectors()


@cache
def computed() -> dict[str, Any]:
    """The same values with the package."""
    updates = {name: np.array(reference.update(i)) for i, name in enumerate(IDS)}
    session = Session(updates, reference.SECRETS, Mode.VERIFIED, reference.TERMS, reference.ROWS, reference.BLUR)
    keys, out = session.keys, dict[str, Any]()
    parts = [(), (b"",), (b"ab", b""), (b"a", hashing.integer(-2), *hashing.listed([b"x", b"yz"]))]
    out["H"] = [hashing.hash_parts(*group).hex() for group in parts]
    out["session"] = session.digest.hex()
    out["keys"] = {name: {"c": key.public.c.hex(), "s": key.public.s.hex()} for name, key in keys.items()}
    out["sigma"] = {name: [key.sigma_b.hex(), key.sigma_s.hex()] for name, key in keys.items()}
    out["training"] = own(reference.SECRETS["bank"], Purpose.TRAINING, session.digest).hex()
    out["view1"] = session.view1.hex()
    streams = {name: Stream(own(reference.SECRETS[name], Purpose.BLUR, session.view1)) for name in IDS}
    out["blur"] = {
        name: np.rint(np.ldexp(stream.normal(4), 28)).astype(int).tolist() for name, stream in streams.items()
    }
    out["blurred"] = {name: np.rint(np.ldexp(v, 40)).astype(int).tolist() for name, v in session.vectors.items()}
    out["commitments"] = {name: hashing.commitment(key.sigma_b).hex() for name, key in keys.items()}
    out["sketches"] = {name: F_P.decode(values).tolist() for name, values in session.sketches.items()}
    out["deal"] = {name: payload.hex() for name, payload in session.dealt.items()}
    out["view_open"] = [hashing.view_open(session.view1, opening, IDS).hex() for opening in range(3)]
    out["noise bound"] = openings.noise_bound(reference.ROWS, len(IDS))
    out["open"] = {
        f"{name} {opening}": payloads.pack_open(session.opening(name, IDS, opening)).hex()
        for opening in (1, 2)
        for name in IDS
    }
    out["gram"] = [triangle(session.gram(IDS, opening)) for opening in (1, 2)]
    view_mask = session.view_mask(COEFFICIENTS)
    out["view_mask"] = view_mask.hex()
    words = {name: session.masked(name, COEFFICIENTS) for name in IDS}
    y = {name: values.astype("<u4").tobytes() for name, values in words.items()}
    out["mask"] = {name: data.hex() for name, data in y.items()}
    noises = {name: noise(reference.SECRETS[name], view_mask, 4) for name in IDS}
    out["evaluation noise"] = {name: np.rint(np.ldexp(z, 28)).astype(int).tolist() for name, z in noises.items()}
    V = [name for name in IDS if name != reference.LOST]
    inputs = [hashing.digest(y[name]) for name in V]
    tau1, tau2 = taus(reference.CHALLENGE, view_mask, V, inputs)
    out["tau"] = [tau1.hex(), tau2.hex()]
    final = hashing.final(view_mask, V, inputs, tau1, hashing.digest(tau2))
    out["final"] = [final.hex(), hashing.final(view_mask, V, inputs).hex()]
    out["second sketch"] = {
        name: F_Q.decode(second_elements(tau1, blocks(session.vectors[name])))[:4].tolist() for name in V
    }
    shares = {name: session.check_shares(name, V, tau1, final) for name in V}
    out["confirm"] = {
        f"{name} {other}": hashing.digest(session.confirm_ciphertext(name, other, held, final)).hex()
        for name in V
        for other, held in zip(V, shares[name], strict=True)
        if other != name
    }
    challenge = verified_mode.challenge(tau2)
    out["challenge"] = [
        hashing.digest(pack(F_Q, challenge.rho)).hex(),
        int(challenge.s[0]),
        F_Q.decode(challenge.E[31, -16:]).tolist(),
    ]
    a = [COEFFICIENTS[name] for name in V]
    replies = {
        name: session.unmasking(
            name, V, [reference.LOST], verified_mode.check_answers([shares[other][i] for other in V], a, challenge)
        ).to_bytes()
        for i, name in enumerate(V)
    }
    out["unmask"] = {name: [data[: 8 * 37].hex(), hashing.digest(data).hex()] for name, data in replies.items()}
    out["sum"] = session.sum({name: words[name] for name in V}, COEFFICIENTS, replies).view(np.int32).tolist()
    return out


@pytest.mark.parametrize("values", [computed, independent])
@pytest.mark.parametrize("part", FROZEN)
def test_the_package_and_an_independent_implementation_give_the_frozen_values(
    part: str, values: Callable[[], dict[str, Any]]
) -> None:
    assert values()[part] == FROZEN[part]
    assert set(values()) == set(FROZEN), "every value is frozen"
