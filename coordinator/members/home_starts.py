"""The starts of a member's workers: of two homes with one identity, only the one that started last is served.

A worker makes a random id when it starts, and tells it with those of the starts of its home before. A home that is the
only one knows the start on record. A copy does not know the starts that the other home has made since.
"""

from datetime import datetime

from sqlalchemy import update
from sqlalchemy.orm import Session

from federation.refusals import Refusal
from federation.v1.federation_pb2 import Hello
from storage.models import Client

START_BYTES = 16
MAX_EARLIER = 32


class HomeCopied(Refusal):
    """Another home of this client has started since; `start` is the one on record."""

    def __init__(self, client_id: str, start: str) -> None:
        super().__init__(
            "home-copied",
            f"another home with the identity of {client_id} has started since the last start of this one: one is a "
            "copy of the other, and each has ledgers of its own. Stop both, then decide at this site which one goes "
            "on: `fedpareto worker copied`",
        )
        self.start = start


def check_starts(hello: Hello) -> None:
    """Checks the form of a worker's starts. Raises the Refusal `hello` if it is not theirs."""
    if not hello.start and not hello.earlier_starts:
        return
    if len(hello.earlier_starts) > MAX_EARLIER:
        raise Refusal("hello", f"{len(hello.earlier_starts)} earlier starts; at most {MAX_EARLIER}")
    for start in (hello.start, *hello.earlier_starts):
        if len(start) != START_BYTES:
            raise Refusal("hello", f"a start of {len(start)} bytes; it has {START_BYTES}")


def take_start(client: Client, hello: Hello) -> None:
    """Takes the start of a Hello for a client whose row is locked; the same one may come again.

    A worker that tells none, as one of version 0.1.0, changes nothing. It is free where none is on record: for a new
    member, after the first start of this version, and after a backup was restored.

    Raises:
        HomeCopied: the start on record is another one, and none of the home.
    """
    if not hello.start:
        return
    # The comparison, and what it sets, are one transaction. Without it, two homes would spend a budget each.
    if client.start and bytes.fromhex(client.start) not in (hello.start, *hello.earlier_starts):
        raise HomeCopied(client.client_id, client.start)
    client.start = hello.start.hex()


def note_copied(session: Session, client_id: str, now: datetime) -> None:
    """Notes that a home of a client was refused, for the alert."""
    session.get_one(Client, client_id, with_for_update=True).copied = now


def forget_starts(session: Session) -> None:
    """Takes all starts from the record, which was restored: the homes know later ones."""
    session.execute(update(Client).values(start="", copied=None))
