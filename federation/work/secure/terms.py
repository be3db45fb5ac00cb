"""The terms of a session, and the statement that a member signs with each reply."""

from dataclasses import dataclass, field
from enum import StrEnum

from federation.secure.thresholds import Mode
from federation.spec.sharing import Unshared
from federation.work.base import Work


class SessionStage(StrEnum):
    """The phases of a session in their order; the value is the name of the kind of work."""

    # Section 2: the order of these lines is that of the phases; `place`, and with it each refusal of an earlier phase,
    # follows them.
    READY = "secure-ready"
    DEAL = "secure-deal"
    OPEN = "secure-open"
    MASK = "secure-mask"
    CONFIRM = "secure-confirm"
    UNMASK = "secure-unmask"

    def place(self, opening: int = 0) -> int:
        """The place of a phase in the order of all; OPEN has three places, one for each opening."""
        # Section 2: a place for each opening: else opening 2 would look like opening 1, asked again.
        return 3 * list(SessionStage).index(self) + opening


@dataclass(frozen=True)
class Invited:
    """An invited member, and the id of its signing key, 32 bytes."""

    client_id: str
    key_id: bytes


@dataclass(frozen=True, kw_only=True)
class SessionTerms:
    """The terms of a session; the fields are those of SecureTerms.

    Attributes:
        clip: 0 for vectors of length 1.
        blur: the size of the noise by which members blur their vectors; 0 for an evaluation, which has its own noise.
        work: its result is the vector of a member.
        unshared: the parameters that the run does not share.
    """

    nonce: bytes
    federation_id: str
    run_id: str
    round: int
    mode: Mode
    base_model: str
    spec: str
    task: str
    length: int
    clip: float
    blur: float
    disclose: tuple[str, ...]
    invited: tuple[Invited, ...]
    work: Work = field(hash=False)
    seed: int
    unshared: Unshared

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the invited members, sorted."""
        # Section 2a: as sent, not sorted here: a list in another order has to be refused, since it gives another view.
        return tuple(member.client_id for member in self.invited)


@dataclass(frozen=True, kw_only=True)
class Statement:
    """The statement that a member signs with its reply to a phase; the fields are those of SecureStatement."""

    session: bytes
    stage: SessionStage
    opening: int = 0
    keys: bytes = b""
    commitment: bytes = b""
    view: bytes = b""
    complaints: tuple[str, ...] = ()
    measured: bytes = b""
    blur: float = 0.0
    signed: bool = False
