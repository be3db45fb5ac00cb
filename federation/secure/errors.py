"""The errors of malformed bytes, keys or numbers of a private round."""

from enum import StrEnum


class Fault(StrEnum):
    """A stable reason."""

    LENGTH = "wrong-length"
    ELEMENT = "not-an-element"
    ORDER = "not-sorted"
    NOT_AUTHENTIC = "not-authentic"
    KEY_ZERO = "low-order-key"
    KEY_FORM = "non-canonical-key"
    KEY_REPEATED = "repeated-key"
    NON_FINITE = "non-finite"
    ZERO = "zero"
    RANGE = "out-of-range"
    ACCUSATION = "accusation"


class Malformed(ValueError):
    """Something that an honest participant does not send.

    Attributes:
        fault: the stable reason.
    """

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(f"{fault}: {message}")
        self.fault = fault
