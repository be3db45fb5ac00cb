"""A worker's messages on its stream, within bounds: names have an alphabet, lists a length, and text is one line."""

import re
from dataclasses import dataclass

from federation.objectives import OBJECTIVE
from federation.refusals import Refusal
from federation.runs import TASK
from federation.text import escaped
from federation.v1.federation_pb2 import Decline, Hello

MAX_HELLO_BYTES = 64 << 10
MAX_TASKS = 100
MAX_OBJECTIVES = 1000  # of all tasks together
MAX_SAMPLES = 2**53
MAX_TEXT = 200  # characters of software and device
MAX_MESSAGE = 400  # characters of a decline
_REASON = re.compile(r"[a-z0-9][a-z0-9_:.-]{0,79}")


@dataclass(frozen=True)
class Introduction:
    """A worker's Hello, within bounds; samples and objectives are by offered task, and the texts are printable."""

    tasks: dict[str, int]
    objectives: dict[str, list[str]]
    software: str
    device: str


def introduction(hello: Hello) -> Introduction:
    """Reads a Hello.

    Raises:
        Refusal: `limit:hello`: too many bytes; `limit:tasks`: too many tasks or objectives, or names that cannot be
            theirs.
    """
    if hello.ByteSize() > MAX_HELLO_BYTES:
        raise Refusal("limit:hello", f"a Hello of {hello.ByteSize()} bytes; at most {MAX_HELLO_BYTES}")
    if len(hello.tasks) > MAX_TASKS:
        raise Refusal("limit:tasks", f"{len(hello.tasks)} tasks offered; at most {MAX_TASKS}")
    count = sum(len(offer.objectives) for offer in hello.tasks)
    if count > MAX_OBJECTIVES:
        raise Refusal("limit:tasks", f"{count} objectives of all tasks together; at most {MAX_OBJECTIVES}")
    for offer in hello.tasks:
        _must_match(TASK, offer.task, "a task")
        for name in offer.objectives:
            _must_match(OBJECTIVE, name, "an objective")
    return Introduction(
        tasks={offer.task: min(offer.samples, MAX_SAMPLES) for offer in hello.tasks},
        objectives={offer.task: list(dict.fromkeys(offer.objectives)) for offer in hello.tasks},
        software=escaped(hello.software, MAX_TEXT),
        device=escaped(hello.device, MAX_TEXT),
    )


def declined(decline: Decline) -> tuple[str, str]:
    """The reason and the message of a decline; the text of a `malformed` reason goes into the message."""
    if _REASON.fullmatch(decline.reason):
        return decline.reason, escaped(decline.message, MAX_MESSAGE)
    return "malformed", escaped(f"{decline.reason[:80]}: {decline.message}", MAX_MESSAGE)


def _must_match(pattern: str, name: str, what: str) -> None:
    if re.fullmatch(pattern, name) is None:
        raise Refusal("limit:tasks", f"'{escaped(name, 80)}' cannot be the name of {what}: it must fit {pattern}")
