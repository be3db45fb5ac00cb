"""The base of the phases of a session after READY."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from federation.secure.errors import Malformed
from federation.secure.member_keys import shared_secret
from federation.secure.thresholds import LARGEST
from federation.vectors import Array
from federation.work.base import Lane, Result, Shows, Terms, Work, WorkError, WorkingClient
from federation.work.secure import member_checks
from federation.work.secure.journal import Journal, session_names
from federation.work.secure.terms import SessionStage, Statement

if TYPE_CHECKING:
    from federation.spec.run_spec import RunSpec

REPLIES, CIPHERTEXTS = "replies", "ciphertexts"
"""Inputs and rows: the signed replies of other members, ciphertexts between members."""
MAX_ENVELOPES = LARGEST * (64 << 10)
"""Bytes of the signed replies of all members to one phase."""


@dataclass(frozen=True, kw_only=True)
class StageWork(Work):
    """A phase after READY. `session` is the digest of its session."""

    lane: ClassVar[Lane] = Lane.PROTOCOL
    needs_samples: ClassVar[bool] = False
    shows: ClassVar[Shows] = Shows.NOTHING
    keeps_inputs: ClassVar[bool] = False  # ciphertexts and others' replies are of no use after the phase
    # Section 3, rule 2: in all attempts together. Two different answers to one phase are two functions of the same
    # secrets.
    once_ever: ClassVar[bool] = True
    # Section 2d: otherwise the text of an exception would leave, which can depend on the data.
    conceals: ClassVar[bool] = True
    stage: ClassVar[SessionStage]

    session: bytes

    @classmethod
    def terms(cls, spec: "RunSpec") -> Terms:
        """The time of a phase; the conversation says how many replies it needs."""
        return Terms(spec.privacy.stage_seconds, None)

    @property
    def from_round_model(self) -> bool:
        return False

    @property
    def place(self) -> int:
        """The number of the opening; 0 at phases other than OPEN."""
        return 0

    def once(self) -> str:
        return f"{self.session.hex()}/{self.name}/{self.place}"

    def kept_under(self) -> str:
        return session_names(self.session)

    def answer(self, client: WorkingClient, computed: Result) -> Result:
        journal = Journal(client.memory, self.session)
        # Section 3, rule 2: before any check: the facts to compare with are erased, so a check would refuse for another
        # reason than that the session is over.
        if not journal.known:
            raise WorkError("this member keeps nothing of the session: it is over", reason="session-over")
        # Section 3, rule 5: before the phase's own checks, which go by the names in the assignment.
        member_checks.check_origin(client, journal)
        # Section 2: before the phase reads its message: a phase that is over is not answered again with what is known
        # by now.
        member_checks.check_order(journal, self.stage, self.place, again=client.again)
        try:
            rows, statement = self.reply(client, journal)
        # Section 3: bytes that others made are a reason to decline, and never end the worker.
        except Malformed as error:
            raise WorkError(str(error), reason="protocol") from error
        return replace(computed, rows=rows, samples=0, statement=statement)

    @abstractmethod
    def reply(self, client: WorkingClient, journal: Journal) -> tuple[dict[str, Array], Statement]:
        """The rows of the payload, and the statement that the member signs with them."""

    def statement(self, **fields: object) -> Statement:
        """A statement of this phase."""
        return Statement(session=self.session, stage=self.stage, opening=self.place, **fields)  # type: ignore[arg-type]


def channel(journal: Journal, other: str) -> bytes:
    """DH(c_i, c_j)."""
    # Section 2.2: the keys that DEAL has checked. A later message cannot exchange a channel.
    return shared_secret(journal.keys.c, journal.publics[other].c)


def bytes_row(name: str, content: bytes) -> dict[str, Array]:
    """The payload of one row of bytes."""
    return {name: np.frombuffer(content, np.uint8)}
