"""One round of Flower's SecAgg+ for `private.py`, in the environment that docs/operate/benchmarks.md describes.

    python flower_secagg.py M D LOST

All clients are in this process, with Flower's own workflow and client modifier, on one thread, without network and
training. Every client holds shares of every other one, and as many shares open a mask as in a private round. LOST
clients vanish before they send their masked vectors.
"""

import json
import logging
import sys
import time
from types import SimpleNamespace
from typing import Any

import flwr
import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import FitRes, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.common.typing import Code, Status
from flwr.compat.common import recorddict_compat as compat
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.supercore.task_identity import TaskIdentity

M, D, LOST = (int(argument) for argument in sys.argv[1:4])


class Client:
    """A client that holds a vector: what it sends and computes."""

    def __init__(self, number: int) -> None:
        self.vector = np.random.default_rng(number).standard_normal(D, dtype=np.float32) / 10
        self.context = Context(0, number, {}, RecordDict(), {})
        self.seconds, self.up, self.down = 0.0, 0, 0

    def fit(self, message: Message, context: Context) -> Message:
        result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([self.vector]), 100, {})
        return Message(compat.fitres_to_recorddict(result, keep_input=False), reply_to=message)

    def answer(self, asked: bytes) -> bytes:
        start = time.process_time()
        message = message_from_proto(ProtoMessage.FromString(asked))
        reply = message_to_proto(secaggplus_mod(message, self.context, self.fit)).SerializeToString()
        self.seconds += time.process_time() - start
        self.down, self.up = self.down + len(asked), self.up + len(reply)
        return bytes(reply)


CLIENTS = {number: Client(number) for number in range(2, M + 2)}
GONE = range(2, LOST + 2)


def carry(message: Message) -> Message:
    """A client's answer to a message of the workflow."""
    number = message.metadata.dst_node_id
    stage = message.content.config_records[RECORD_KEY_CONFIGS][Key.STAGE]
    if number in GONE and stage in (Stage.COLLECT_MASKED_VECTORS, Stage.UNMASK):
        return Message(Error(1), reply_to=message)
    reply = CLIENTS[number].answer(message_to_proto(message).SerializeToString())
    return message_from_proto(ProtoMessage.FromString(reply))


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # the server, in its messages
    proxies = [SimpleNamespace(node_id=number, cid=str(number)) for number in CLIENTS]  # as the strategy sees clients
    manager: Any = SimpleNamespace(num_available=lambda: M, sample=lambda **_: proxies)
    grid: Any = SimpleNamespace(send_and_receive=lambda messages, **_: [carry(message) for message in messages])
    context: Any = LegacyContext(Context(0, 0, {}, RecordDict(), {}), client_manager=manager)
    context.state.config_records[MAIN_CONFIGS_RECORD] = flwr.app.ConfigRecord({WorkflowKey.CURRENT_ROUND: 1})
    model = compat.parameters_to_arrayrecord(ndarrays_to_parameters([np.zeros(D, np.float32)]), keep_input=False)
    context.state.array_records[MAIN_PARAMS_RECORD] = model
    start = time.process_time()
    SecAggPlusWorkflow(num_shares=M, reconstruction_threshold=2 * M // 3 + 1)(grid, context)
    clients = CLIENTS.values()
    seconds = time.process_time() - start - sum(client.seconds for client in clients)
    (found,) = context.state.array_records[MAIN_PARAMS_RECORD].to_numpy_ndarrays()
    exact = np.mean([client.vector for number, client in CLIENTS.items() if number not in GONE], axis=0)
    if not np.abs(found - exact).max() < 1e-3:
        raise SystemExit("the mean of Flower's SecAgg+ is wrong")
    result = {
        "software": f"Flower {flwr.__version__}",
        "member_seconds": max(client.seconds for client in clients),
        "coordinator_seconds": seconds,
        "up": max(client.up for client in clients),
        "down": max(client.down for client in clients) - 4 * D,
    }
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
