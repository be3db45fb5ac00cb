"""Runs whose model is filled from a signed result of statistics, for the tests of these runs."""

from typing import Any

import numpy as np

from federation.statistics.scale import ScaleLayer, scale_of
from federation.v1.admin_pb2 import GetRoundRequest
from federation.v1.common_pb2 import SignedEnvelope
from federation.vectors import Layout, Tensor, to_bytes
from storage.states import RunState
from tests.described import COLUMNS, document, drawn, tell
from tests.stage import LAYOUT, Player, Stage

LAYER = ScaleLayer("scale", tuple(column.name for column in COLUMNS[:2]))
WHOLE = Layout((*LAYOUT.tensors, *(Tensor(name, (2,)) for name in LAYER.tensors)))


def described(stage: Stage, task: str, players: list[Player]) -> tuple[SignedEnvelope, bytes]:
    """The signed result of a run that has described the data of these players, and its document."""
    run = stage.submit(document(task))
    for number, player in enumerate(players):
        assert tell(player, drawn(number)).accepted
    stage.wait_state(run, RunState.COMPLETED)
    shown = stage._admin.GetRound(GetRoundRequest(run=run, round=0))
    return shown.result, shown.document


def filled(told: bytes, change: float = 0.0, values: float = 1.0) -> bytes:
    """A model that is filled from a result; or nearly. The others of its numbers are up to `values`."""
    tensors = scale_of(told, LAYER.columns).of(LAYER)
    tensors["scale.mean"][1] += np.float32(change)
    row = np.linspace(-values, values, LAYOUT.size, dtype=np.float32)
    trained = dict(zip(LAYOUT.shapes, LAYOUT.split(row).values(), strict=True))
    return to_bytes(WHOLE, WHOLE.join({**trained, **tensors}))


def keys(result: str, more: str = "") -> dict[str, Any]:
    """The keys of a run that names this result."""
    return {"more": f'parameters.fixed = ["scale.*"]\nparameters.statistics = "{result}"\n{more}'}
