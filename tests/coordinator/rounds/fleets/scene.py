"""Members in private rounds, played by hand up to READY."""

import secrets

from federation.secure.member_keys import member_keys
from federation.secure.thresholds import BLUR
from federation.v1.common_pb2 import AssignmentManifest
from federation.v1.secure_pb2 import SecureStatement
from federation.work.secure.orders import asked_session
from tests.harness import wait_for
from tests.stage import Player

PRIVATE = 'privacy.secure = "sum"\nselection.minimum = 5'


def is_ready(player: Player, order: AssignmentManifest) -> None:
    """Replies to READY of a private round."""
    session = asked_session(order)
    public = member_keys(secrets.token_bytes(32), session).public
    said = SecureStatement(session=session, stage="secure-ready", keys=public.c + public.s, blur=BLUR)
    player.reply(order, statement=said.SerializeToString(), metrics={})


def ended(player: Player, count: int = 1) -> list[tuple[str, bytes, str]]:
    """Waits until a player was told of so many ends, of each once or twice: the assignment, session and reason."""

    def told() -> bool:
        player.kept = player.orders()
        return len(ends()) >= count

    def ends() -> list[tuple[str, bytes, str]]:
        return list(dict.fromkeys((one.assignment_id, one.session, one.reason) for one in player.cancelled))

    wait_for(told, f"{player.name} to be told of {count} ends")
    return ends()
