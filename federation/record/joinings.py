"""The certificates of a member's newest joining, as the entries of the audit log tell of them.

A withdrawal names a certificate, and holds for the joining that this certificate is of. So nobody can use it again
after the member has come back.
"""

import re
from collections.abc import Iterable

ENROLLED = "Enroll"
JOINED_AGAIN = "client.joined-again"
RENEWED = "Renew"
ROTATED = "key.rotated"
LEFT = "client.left"
JOININGS = (ENROLLED, JOINED_AGAIN)
WITH_CERTIFICATES = (*JOININGS, RENEWED, ROTATED)  # actions of entries that tell of a certificate
_CERTIFICATE = re.compile(r"certificate ([0-9a-f]{1,40})(?:,|$)")


def is_of_newest_joining(certificate: str, told: Iterable[tuple[str, str]]) -> bool:
    """True if a certificate was issued to a member since it joined last.

    Version 0.1.0 logs no certificate with a new signing key. So where a key was replaced since, a certificate counts
    that no entry tells of.

    Args:
        certificate: its serial number, hexadecimal.
        told: action and detail of the entries about the member, in the order of the log.
    """
    earlier, present, untold = set[str](), set[str](), False
    for action, detail in told:
        if action in JOININGS:
            earlier, present, untold = earlier | present, set(), False
        found = _CERTIFICATE.search(detail)
        if action in WITH_CERTIFICATES and found is not None:
            present.add(found[1])
        elif action == ROTATED:
            untold = True
    return certificate in present or (untold and certificate != "" and certificate not in earlier)
