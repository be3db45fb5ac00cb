"""The fields by which signed messages belong together, each list once.

A message repeats fields of the one that it answers: the reply those of its assignment, the receipt those of its reply.
The maker of a message fills them with `repeated`; whoever receives, records, shows or verifies it compares them with
`difference`.
"""

from collections.abc import Iterable
from typing import Any

PLACE = ("federation_id", "run_id", "round", "phase", "assignment_id", "client_id", "base_model")
"""What an assignment, its reply and the receipt have in common."""
REPLY = (*PLACE, "attempt", "spec", "task", "rows")
"""What a reply repeats of its assignment."""
RECEIPT = (*PLACE, "payload")
"""What a receipt repeats of its reply."""
DECLINE = ("federation_id", "client_id", "assignment_id")
"""What a decline repeats of its assignment."""
TERMS = ("federation_id", "run_id", "round", "base_model", "spec", "task", "seed")
"""What the terms of a private session repeat of its assignments, besides the parameters that the run does not share."""
SESSION = ("federation_id", "run_id", "round", "spec")
"""What the replies of all members of a private session repeat of its terms."""


def repeated(original: object, fields: Iterable[str]) -> dict[str, Any]:
    """The values of these fields of a message, by name, for the message that answers it."""
    return {name: getattr(original, name) for name in fields}


def difference(original: object, answer: object, fields: Iterable[str]) -> str:
    """The name of the first of these fields in which two messages differ; empty if they agree in all."""
    return next((name for name in fields if getattr(original, name) != getattr(answer, name)), "")
