"""Runs a worker that cheats in private rounds.

    python tests/programs/lying.py FILE worker run --home DIR ...

FILE holds the cheats, such as `scaled:3 shared:3`; it is read whenever the worker comes to a place where it could
cheat, and an empty file is an honest member. The functions around these places run as shipped.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from federation.secure.encryption import TAG
from federation.secure.fields import F_P, F_Q, Field
from federation.secure.thresholds import T_ROWS
from federation.secure.wire import pack, unpack
from federation.vectors import Array
from federation.work.base import Result, WorkingClient
from federation.work.secure.stage import StageWork

Edit = Callable[[StageWork, WorkingClient, Result, list[str]], Result]


def _rows(change: Callable[[StageWork, WorkingClient, Array, list[str]], Array]) -> Edit:
    """An edit of the payload, which is one row."""

    def edit(work: StageWork, client: WorkingClient, result: Result, values: list[str]) -> Result:
        return replace(
            result, rows={name: change(work, client, row.copy(), values) for name, row in result.rows.items()}
        )

    return edit


def _elements(field: Field, change: Callable[[Array, Any, WorkingClient, list[str]], Array]) -> Edit:
    """An edit of a payload of field elements."""

    def edit(work: StageWork, client: WorkingClient, row: Array, values: list[str]) -> Array:
        elements = unpack(field, row.tobytes(), len(row) // field.width)
        return np.frombuffer(pack(field, change(elements, work, client, values)), np.uint8)

    return _rows(edit)


def _garbled(work: StageWork, client: WorkingClient, row: Array, values: list[str]) -> Array:
    """The ciphertexts for the first members are bad: of as many as the value says."""
    count = int(values[0])
    size = len(row) // (len(work.members) - 1)  # type: ignore[attr-defined]
    row[TAG : count * size : size] ^= 1
    return row


def _raised(elements: Array, work: Any, client: WorkingClient, values: list[str]) -> Array:
    """Adds a number to entries of the Gram matrix: "own", those of this member with others, or "all" of two members."""
    if work.opening == 0:
        return elements
    amount, which = values
    first, second = np.triu_indices(len(work.members))
    me = work.members.index(client.client_id)
    chosen = (first != second) & ((first == me) | (second == me) if which == "own" else True)
    more = F_P.encode(np.where(chosen, int(float(amount) * 2**28), 0))
    return F_P.add(elements, more)


def _wrong_masks(elements: Array, work: Any, client: WorkingClient, values: list[str]) -> Array:
    """Wrong shares of the mask secrets of the first members."""
    count = 5 * int(values[0])
    elements[:count] = F_Q.add(elements[:count], np.ones(count, np.uint64))
    return elements


def _lower_norms(elements: Array, work: Any, client: WorkingClient, values: list[str]) -> Array:
    """Too small norms of all members."""
    start = 5 * (len(work.members) + len(work.lost))
    chosen = slice(start, start + len(work.members))
    elements[chosen] = F_Q.sub(elements[chosen], F_Q.encode(np.full(len(work.members), 2**31)))
    return elements


def _accusing(work: Any, client: WorkingClient, result: Result, values: list[str]) -> Result:
    """Accuses the first other members of bad ciphertexts: as many as the value says."""
    if work.opening:
        return result
    others = [name for name in work.members if name != client.client_id]
    return replace(result, statement=replace(result.statement, complaints=tuple(others[: int(values[0])])))


def _other_view(work: StageWork, client: WorkingClient, result: Result, values: list[str]) -> Result:
    """Signs that it was told something else."""
    return replace(result, statement=replace(result.statement, view=bytes(32)))


EDITS: dict[str, tuple[str, Edit]] = {
    "bad-ciphertexts": ("secure-deal", _rows(_garbled)),
    "accusing": ("secure-open", _accusing),
    "raised": ("secure-open", _elements(F_P, _raised)),
    "other-view-at-mask": ("secure-mask", _other_view),
    "other-view-at-confirm": ("secure-confirm", _other_view),
    "bad-shares": ("secure-confirm", _rows(_garbled)),
    "wrong-masks": ("secure-unmask", _elements(F_Q, _wrong_masks)),
    "lower-norms": ("secure-unmask", _elements(F_Q, _lower_norms)),
}
"""By the name of a cheat: the stage whose reply is edited, and how."""


def install(file: Path) -> None:
    """Puts the cheats into the worker of this process."""
    from federation.secure import masks, verified_mode

    def cheats() -> dict[str, list[str]]:
        parts = [cheat.split(":") for cheat in file.read_text().split()]
        return {name: values for name, *values in parts}

    def factor(name: str) -> float:
        return float(cheats().get(name, ["1"])[0])

    answer = StageWork.answer

    def edited(self: StageWork, client: WorkingClient, computed: Result) -> Result:
        while cheats().get("waits") == [self.name]:  # `waits:STAGE`: does not answer while the file says so
            time.sleep(0.02)  # the test changes a file, which does not notify
        result = answer(self, client, computed)
        for name, values in cheats().items():
            stage, edit = EDITS.get(name, ("", None))
            if edit is not None and stage == self.name:
                result = edit(self, client, result, values)
        return result

    StageWork.answer = edited  # type: ignore[method-assign]

    masked = masks.masked

    def scaled(vector: Any, coefficient: int, streams: Any) -> Iterator[Any]:
        """`scaled:F`: the masked vector is F times as long."""
        kept = list(vector)
        for block, words in zip(kept, masked(kept, coefficient, streams), strict=True):
            honest, more = (np.rint(block * size * np.ldexp(coefficient, -4)) for size in (1.0, factor("scaled")))
            yield words + (more - honest).astype(np.int64).astype(np.uint32)

    masks.masked = scaled  # type: ignore[assignment]

    dealt = verified_mode.check_shares

    def shared(sketch: Any, points: Any, t: int, secret: bytes, final: bytes) -> Any:
        """`shared:F`: the second sketch is F times as long; `no-polynomial`, `no-zero`: its shares are wrong."""
        longer = F_Q.encode(np.rint(F_Q.decode(sketch) * factor("shared")).astype(np.int64))
        found = dealt(longer, points, t, secret, final)
        chosen = cheats()
        for place, shares in enumerate(found, 1):
            values = shares.values
            if "no-polynomial" in chosen:
                values[:] = F_Q.add(values, np.full(len(values), place**7, np.uint64))
            if "no-zero" in chosen:
                values[T_ROWS : T_ROWS + 1] = F_Q.add(values[T_ROWS : T_ROWS + 1], np.ones(1, np.uint64))
        return found

    verified_mode.check_shares = shared
    _sign_twice(cheats)


def _sign_twice(cheats: Callable[[], dict[str, list[str]]]) -> None:
    """`two-statements`: signs other keys, too, after its reply to "secure-ready" was accepted."""
    import grpc

    from federation.trust.envelope import sign
    from federation.v1.common_pb2 import AssignmentManifest, ReplyManifest
    from federation.v1.federation_pb2 import SubmitRequest
    from federation.v1.secure_pb2 import SecureStatement
    from worker.work.submitter import Submitter

    submit = Submitter._submit

    def again(self: Submitter, files: Any, entry: Any) -> bool:
        done = submit(self, files, entry)
        kind = AssignmentManifest.FromString(entry.assignment.manifest).kind
        if done and "two-statements" in cheats() and kind == "secure-ready":
            other = ReplyManifest()
            other.CopyFrom(entry.manifest)
            statement = SecureStatement.FromString(other.statement)
            statement.keys = statement.keys[::-1]
            other.statement = statement.SerializeToString()
            try:
                request = SubmitRequest(reply=sign(other, self.attendance.member.signing_key)).SerializeToString()
                list(files.submit(iter([request]), timeout=60))
            except grpc.RpcError as error:
                print(f"the second reply was refused: {error.code()}")
        return done

    Submitter._submit = again  # type: ignore[method-assign]


if __name__ == "__main__":
    _, chosen, *arguments = sys.argv
    install(Path(chosen))
    sys.argv = ["fedpareto", *arguments]
    from fedpareto.cli.main import main

    main()
