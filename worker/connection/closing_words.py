"""What a worker says in its messages of the site that is closed or paused."""

from federation.v1.federation_pb2 import Heartbeat, Hello
from federation.work.closing import SiteClosing


def tell_closing(message: Hello | Heartbeat, closing: SiteClosing | None) -> None:
    """Says in a message why the site begins no work now; nothing while it is open."""
    if closing is not None:
        message.paused = closing.paused
        if closing.until is not None:
            message.closed_until.FromDatetime(closing.until)
