"""Members that describe data of theirs, as the real code does, in a run that a test plays by hand."""

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.spec.run_spec import with_columns
from federation.statistics.data_columns import Column
from federation.statistics.held import HeldData
from federation.statistics.rules import MemberRules
from federation.v1.common_pb2 import AssignmentManifest, ReceiptManifest
from federation.vectors import payload_bytes
from federation.work.base import Origin, Result, Shape, WorkingClient, payload_layout
from federation.work.registry import decode
from federation.work.site import Site
from federation.work.statistics.work import ROW, Statistics
from tests.stage import LAYOUT, Player

COLUMNS = (Column(name="age", low=0.0, high=100.0), Column(name="x1"), Column(name="ill", classes=2))
SHAPE = Shape(LAYOUT, ("loss",), ("loss",))
Numbers = NDArray[np.float64]


class Held(HeldData):
    """A table of two features, and classes."""

    def __init__(self, x: Numbers, y: Numbers, columns: tuple[Column, ...] = COLUMNS) -> None:
        self.x, self.y = x, y
        self._columns = columns

    @property
    def columns(self) -> tuple[Column, ...]:
        return self._columns

    def parts(self, split: str) -> Iterator[tuple[Any, Any]]:
        yield self.x, self.y


def drawn(seed: int, count: int = 200) -> Held:
    random = np.random.default_rng(seed)
    x = np.stack([random.uniform(20, 80, count), random.normal(0, 1, count)], axis=1)
    x[random.random(count) < 0.1, 1] = np.nan
    return Held(x, random.integers(0, 2, count).astype(float))


def document(task: str, more: str = "") -> bytes:
    text = f'name = "{task}"\ntask = "{task}"\nkind = "statistics"\n{more}[statistics]\nopen = true\nbins = 4\n'
    return with_columns(text.encode(), COLUMNS)


def client(data: HeldData | None, rules: MemberRules | None = MemberRules()) -> WorkingClient:  # noqa: B008 - frozen
    """A client of the real code, whose owner tells statistics by these rules."""
    origin = Origin("f", "r", "t", "s", "m", 0, None)  # type: ignore[arg-type]
    site = Site(statistics=MappingProxyType({} if rules is None else {"t": rules}))
    return WorkingClient("ada", 0, 0, SHAPE, None, origin, site, data=data)  # type: ignore[arg-type]


def tell(player: Player, data: Held, change: bytes = b"") -> ReceiptManifest:
    """Answers with what the real work gives; or with other bytes."""
    order: AssignmentManifest = player.order()
    work = decode(order.kind, order.work, SHAPE)
    assert isinstance(work, Statistics)
    rows = dict(work.answer(client(data), Result({}, {}, {}, 10)).rows)
    if change:
        rows = {ROW: np.frombuffer(change.ljust(len(rows[ROW]), b"\0"), np.uint8)}
    payload = b"".join(payload_bytes(payload_layout(work.payload), rows))
    manifest = player.member.manifest(order, payload)
    manifest.metrics.clear()
    manifest.losses.clear()
    return player.member.submit(player.member.sign(manifest), payload)
