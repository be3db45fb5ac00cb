"""The lists of fields by which signed messages belong together.

A message repeats fields of the message that it answers: the reply those of its assignment, the receipt those of its
reply. The maker of a message fills them with `repeated`; its receivers and verifiers compare them with `difference`.
"""

from collections.abc import Iterable
from typing import Any

PLACE = ("federation_id", "run_id", "round", "phase", "assignment_id", "client_id", "base_model")
"""The common fields of an assignment, its reply and the receipt."""
REPLY = (*PLACE, "attempt", "spec", "task", "rows")
"""The fields of its assignment that a reply repeats."""
RECEIPT = (*PLACE, "payload")
"""The fields of its reply that a receipt repeats."""
DECLINE = ("federation_id", "client_id", "assignment_id")
"""The fields of its assignment that a decline repeats."""
TERMS = ("federation_id", "run_id", "round", "base_model", "spec", "task", "seed")
"""The fields of its assignments that the terms of a private session repeat, besides the unshared parameters."""
SESSION = ("federation_id", "run_id", "round", "spec")
"""The fields of its terms that the replies of all members of a private session repeat."""


def repeated(original: object, fields: Iterable[str]) -> dict[str, Any]:
    """The values of these fields of a message, by name, for the message that answers it."""
    return {name: getattr(original, name) for name in fields}


def difference(original: object, answer: object, fields: Iterable[str]) -> str:
    """The name of the first of these fields in which two messages differ; empty if they agree in all."""
    return next((name for name in fields if getattr(original, name) != getattr(answer, name)), "")
