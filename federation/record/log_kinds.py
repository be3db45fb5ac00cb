"""The kinds of entries of the audit log, by which readers choose."""

from collections.abc import Mapping
from types import MappingProxyType

REFUSALS = "refusals"  # every entry with a reason, of any action
# The actions of each kind. One that ends in a point stands for all that begin like this; one that begins with a point
# stands for all that end like this. tools/tables.py writes the table of docs/operate/audit-log.md from it.
KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "members": ("Enroll", "Renew", "key.rotated", "client.", "certificate.", "join-string."),
        "administrators": ("admin.", "request."),
        "runs": ("run.", "consent."),
        "rounds": ("assignment.", "reply.", "round.", "member.named"),
        "exports": (".exported",),
        "coordinator": ("coordinator.", "backup.", "configuration.", "key.set", "log."),
        REFUSALS: (),
    }
)
