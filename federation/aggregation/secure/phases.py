"""The phases of a session: the members that each asks, their work, and the replies that it needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from federation.aggregation.phases import AlgorithmPhase, Asked, Closing
from federation.secure.thresholds import Mode
from federation.transport.transfer_times import slowest_seconds
from federation.work.secure.deal import Deal, Open
from federation.work.secure.masking import Confirm, Mask, Unmask
from federation.work.secure.ready import SPECIFICATION, Ready
from federation.work.secure.stage import CIPHERTEXTS, REPLIES
from federation.work.secure.terms import SessionTerms


@dataclass(frozen=True, kw_only=True)
class StagePhase(AlgorithmPhase):
    """A phase of a session. All that are asked may reply; with fewer than `needed` replies the round is skipped."""

    needed: int = 0

    def closes(self, asked: int) -> Closing:
        # All that are asked may reply: closed at `needed` replies, a phase would make slow honest members count as
        # lost.
        return Closing(asked, self.needed)


@dataclass(frozen=True, kw_only=True)
class ReadyPhase(StagePhase):
    """READY."""

    kind = Ready

    agreed: SessionTerms
    terms_bytes: bytes
    specification: bytes

    def inputs(self) -> Mapping[str, bytes]:
        # Section 3, rule 5: members compare the terms with the document itself; without it they decline.
        return {SPECIFICATION: self.specification}

    def work(self, asked: Asked) -> Ready:
        return Ready(agreed=self.agreed, terms_bytes=self.terms_bytes)


@dataclass(frozen=True, kw_only=True)
class _Later(StagePhase):
    """A phase after READY.

    Attributes:
        session: its digest.
        replies: an input for all members: the signed replies to an earlier phase; None if the phase needs none.
        ciphertexts: makes the input of one member: the ciphertexts for it, by sender; None if the phase needs none.
    """

    session: bytes
    replies: bytes | None = None
    ciphertexts: Callable[[str], bytes] | None = None

    def inputs(self) -> Mapping[str, bytes]:
        # Section 2: the same bytes for all members, since these are signed replies, which each member verifies itself.
        return {} if self.replies is None else {REPLIES: self.replies}

    def own_inputs(self, client_id: str) -> Mapping[str, bytes]:
        # Section 2.4: for one member alone: nobody else can read them, and m members have m^2 of them.
        return {} if self.ciphertexts is None else {CIPHERTEXTS: self.ciphertexts(client_id)}


@dataclass(frozen=True, kw_only=True)
class DealPhase(_Later):
    """DEAL, of the members that are ready."""

    kind = Deal

    mode: Mode
    members: tuple[str, ...]

    def work(self, asked: Asked) -> Deal:
        return Deal(session=self.session, mode=self.mode, members=self.members)


@dataclass(frozen=True, kw_only=True)
class OpenPhase(_Later):
    """OPEN over the members W; `opening` is its number, 0 to 2."""

    kind = Open

    opening: int
    members: tuple[str, ...]

    def work(self, asked: Asked) -> Open:
        return Open(session=self.session, opening=self.opening, members=self.members)


@dataclass(frozen=True, kw_only=True)
class MaskPhase(_Later):
    """MASK over W, whose coefficients are in units of 2^-32."""

    kind = Mask

    members: tuple[str, ...]
    coefficients: tuple[int, ...]
    length: int

    def work(self, asked: Asked) -> Mask:
        return Mask(session=self.session, members=self.members, coefficients=self.coefficients, length=self.length)

    def transfer_seconds(self) -> float:
        """The time for a masked vector, 4 bytes for each coordinate, or 8 for each integer."""
        return slowest_seconds((8 if set(self.coefficients) == {1} else 4) * self.length)


@dataclass(frozen=True, kw_only=True)
class ConfirmPhase(_Later):
    """CONFIRM over V, with the digests of their masked vectors."""

    kind = Confirm

    members: tuple[str, ...]
    masked: tuple[bytes, ...]
    tau1: bytes = b""
    commitment: bytes = b""

    def work(self, asked: Asked) -> Confirm:
        return Confirm(
            session=self.session,
            members=self.members,
            masked=self.masked,
            tau1=self.tau1,
            commitment=self.commitment,
        )


@dataclass(frozen=True, kw_only=True)
class UnmaskPhase(_Later):
    """UNMASK: V, and the members of W whose masked vectors did not arrive."""

    kind = Unmask

    members: tuple[str, ...]
    lost: tuple[str, ...]
    tau2: bytes = b""

    def work(self, asked: Asked) -> Unmask:
        return Unmask(session=self.session, members=self.members, lost=self.lost, tau2=self.tau2)
