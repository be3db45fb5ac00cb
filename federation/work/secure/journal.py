"""The durable records of a member about a session, until the attempt at the round is over.

All randomness follows from 32 secret bytes, so a restarted member gives the same bytes. Values that cannot be derived
are kept: the terms, the vector, the other members' keys and shares, and the agreed facts of each phase.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.digests import digest
from federation.secure import blur, hashing
from federation.secure.blocks import Blocks, blocks, norm, scaled, unit
from federation.secure.dealing import DealShares, deal_bytes
from federation.secure.encryption import TAG
from federation.secure.hashing import PublicKeys
from federation.secure.member_keys import MemberKeys, member_keys
from federation.secure.random_direction import random_direction
from federation.secure.thresholds import Mode, Thresholds
from federation.work.base import Memory, WorkError
from federation.work.secure.terms import SessionStage


def session_names(session: bytes) -> str:
    """The beginning of the names of a session's values in the memory of the attempt."""
    return f"{session.hex()}/"


class Journal:
    """The journal of one session, for one phase. Values are written durably before they return."""

    def __init__(self, memory: Memory, session: bytes) -> None:
        self._memory = memory
        self.session = session

    def _get(self, name: str) -> bytes | None:
        return self._memory.get(session_names(self.session) + name)

    def _put(self, name: str, value: bytes) -> None:
        # On the disk before this returns: a restarted member that draws anew sends a second, different reply under the
        # same masks.
        self._memory.put(session_names(self.session) + name, value, durable=True)

    def _must(self, name: str) -> bytes:
        value = self._get(name)
        # Section 3, rule 2: what was erased is not drawn again. Other secrets for the same vector would make a second
        # sum of it.
        if value is None:
            raise WorkError("this member keeps nothing of the session: it is over", reason="session-over")
        return value

    # --- READY

    @property
    def known(self) -> bool:
        """True if a secret of the session is kept."""
        return self._get("secret") is not None

    @property
    def secret(self) -> bytes:
        """32 bytes from which all randomness of the session follows."""
        return self._must("secret")

    def begin(self, secret: bytes) -> None:
        """Keeps the secret."""
        self._put("secret", secret)

    @cached_property
    def keys(self) -> MemberKeys:
        """The member's own keys."""
        return member_keys(self.secret, self.session)

    def keep_vector(self, vector: NDArray[np.float32] | NDArray[np.int64], divisor: float) -> str:
        """Keeps the vector and its divisor. Returns the vector's digest."""
        kept = vector.tobytes()
        self._put("vector", kept)
        # Kept, not computed again: another processor would round the length otherwise, and y would change under its
        # mask.
        self._put("divisor", np.float64(divisor).tobytes())
        return digest(kept)

    def own_vector(self) -> Blocks:
        """The blocks of u: the vector of READY over its divisor.

        Raises:
            WorkError: the vector that is kept is not the one of READY.
        """
        (divisor,) = np.frombuffer(self._must("divisor"), np.float64)
        return unit(blocks(self._values), float(divisor))

    def integers(self) -> NDArray[np.int64]:
        """The integers of READY. Raises WorkError: what is kept are not those of READY."""
        return np.frombuffer(self._kept(), np.int64)

    def vector(self) -> Blocks:
        """The blocks of v: u blurred, as long as u. Raises as `own_vector`, and if DEAL has not been reached."""
        before, after = self._lengths
        # Section 2c: v is as long as u, so the checks of section 4 hold for blurred vectors as they are.
        return scaled(self._blurred(), before / after if after else 0.0)

    def direction(self) -> Blocks:
        """The blocks of v with length 1, also where u is shorter than the clip. Raises as `vector`.

        A zero vector has no direction, and gets a random one.
        """
        # Section 2d: an honest zero and a failed computation with a clip look alike, as both get this direction.
        if not self._values.any():
            drawn = random_direction(self.secret, self.session, len(self._values))
            return unit(blocks(drawn), norm(blocks(drawn)))
        _, after = self._lengths
        return unit(self._blurred(), after)

    def _blurred(self) -> Blocks:
        # Section 2c: the blur that this member signed at READY, over the thresholds of U1: no later message can lower
        # the noise.
        size = blur.deviation(self.agreed(SessionStage.READY)["blur"], self.thresholds)
        return blur.blurred(self.own_vector(), self.secret, self.view1, size)

    @cached_property
    def _lengths(self) -> tuple[float, float]:
        """The lengths of u and of b, which are kept, so that another processor rounds nothing differently."""
        if (kept := self._get("lengths")) is None:
            kept = np.array([norm(self.own_vector()), norm(self._blurred())], np.float64).tobytes()
            self._put("lengths", kept)
        before, after = np.frombuffer(kept, np.float64).tolist()
        return before, after

    @cached_property
    def _values(self) -> NDArray[np.float32]:
        return np.frombuffer(self._kept(), np.float32)

    def _kept(self) -> bytes:
        kept = self._must("vector")
        # Section 2: shares, sketch and y have to be of one vector, or the checks of section 4 blame an honest member.
        if digest(kept) != self.agreed(SessionStage.READY)["vector"]:
            raise WorkError("the update that is kept is not the one of this session", reason="session-over")
        return kept

    # --- the agreed facts of each phase

    def facts(self, stage: SessionStage, opening: int = 0) -> dict[str, Any] | None:
        """The agreed facts of a phase; None if the phase has not been reached."""
        value = self._get(f"facts/{stage.place(opening)}")
        if value is None:
            return None
        facts: dict[str, Any] = json.loads(value)
        return facts

    def agreed(self, stage: SessionStage, opening: int = 0) -> dict[str, Any]:
        """The agreed facts of a phase. Raises WorkError if the phase has not been reached."""
        facts = self.facts(stage, opening)
        if facts is None:
            raise WorkError(f"this member has not answered {stage.value}, opening {opening}", reason="stage")
        return facts

    def agree(self, stage: SessionStage, opening: int, facts: Mapping[str, Any]) -> None:
        """Keeps the agreed facts of a phase, before the member answers."""
        self._put(f"facts/{stage.place(opening)}", json.dumps(dict(facts), sort_keys=True).encode())

    def reached(self) -> int:
        """The place of the last phase that was answered; -1 before the first."""
        places = (stage.place(opening) for stage in SessionStage for opening in range(3))
        return max((place for place in places if self._get(f"facts/{place}") is not None), default=-1)

    # --- the cohort

    @cached_property
    def ids(self) -> list[str]:
        """U1, sorted."""
        return sorted(self.agreed(SessionStage.DEAL)["keys"])

    @cached_property
    def mode(self) -> Mode:
        """The mode of the session."""
        return Mode(self.agreed(SessionStage.READY)["mode"])

    @cached_property
    def thresholds(self) -> Thresholds:
        """The numbers of the cohort U1."""
        # Section 1: of U1, not of W: with a W that shrinks, a coordinator could lower t until nobody is protected.
        return Thresholds(len(self.ids), self.mode)

    @cached_property
    def points(self) -> dict[str, int]:
        """x_j of each member of U1."""
        # Section 2: the position in U1 for the whole session. Counted anew after a loss, shares would belong to other
        # points.
        return {name: point for point, name in enumerate(self.ids, 1)}

    @cached_property
    def publics(self) -> dict[str, PublicKeys]:
        """The public keys of U1."""
        shown = self.agreed(SessionStage.DEAL)["keys"]
        return {name: PublicKeys(bytes.fromhex(both[:64]), bytes.fromhex(both[64:])) for name, both in shown.items()}

    @cached_property
    def view1(self) -> bytes:
        """The view after READY."""
        return hashing.view1(self.session, self.publics)

    # --- shares

    def keep_own(self, name: str, share: bytes) -> None:
        """Keeps this member's own share of its deal at a phase."""
        self._put(f"own/{name}", share)

    def own_share(self, name: str) -> bytes:
        """This member's own share of its deal at a phase."""
        return self._must(f"own/{name}")

    def keep_shares(self, held: Mapping[str, DealShares]) -> None:
        """Keeps the shares of the dealers whose ciphertexts are good, which OPEN 0 names."""
        self._put("shares", b"".join(held[name].to_bytes() for name in sorted(held)))

    def shares(self, names: Sequence[str]) -> list[DealShares]:
        """The shares of some dealers.

        Raises:
            WorkError: the share of one is missing.
        """
        held, rows = self.agreed(SessionStage.OPEN)["held"], self.thresholds.k
        value, size = self._must("shares"), deal_bytes(rows) - TAG
        chosen = []
        for name in names:
            # Section 3, rule 3: declined, and not answered with something else: wrong elements spoil G, and the checks
            # call for a liar.
            if name not in held:
                raise WorkError(f"this member holds no share of {name}", reason=f"bad-share:{name}")
            start = size * held.index(name)
            chosen.append(DealShares.from_bytes(value[start : start + size], rows))
        return chosen
