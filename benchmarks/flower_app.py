"""Runs a case of `simulate.py` with Flower's simulation, in the environment that docs/operate/benchmarks.md describes.

python flower_app.py CASE RESULT CORES
"""

import sys
import time
from pathlib import Path

import flwr
import torch
from fedavg import Result, opened
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

client_app, server_app = ClientApp(), ServerApp()


@client_app.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    config, number = message.content["config"], int(context.node_config["partition-id"])
    client = opened(Path(config["case"]))
    state = message.content["arrays"].to_torch_state_dict()
    trained = client.train(state, number, config["server-round"] - 1)
    samples = MetricRecord({"num-examples": len(client.case.y[number])})
    return Message(RecordDict({"arrays": ArrayRecord(trained), "metrics": samples}), reply_to=message)


@server_app.main()  # type: ignore[untyped-decorator]
def serve(grid: Grid, context: Context) -> None:
    client = opened(Path(sys.argv[1]))
    ends: list[float] = []

    def round_ended(number: int, arrays: ArrayRecord) -> None:
        if number:  # also called before the first round, as 0
            ends.append(time.monotonic())

    count = client.case.clients
    # Without these minimums, Flower begins before all nodes are available.
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=count, min_available_nodes=count)
    done = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(client.initial()),
        num_rounds=client.case.rounds,
        train_config=ConfigRecord({"case": sys.argv[1]}),
        evaluate_fn=round_ended,
    )
    model = client.vector(done.arrays.to_torch_state_dict())
    torch.save(Result(model, ends, f"Flower {flwr.__version__}"), sys.argv[2])


if __name__ == "__main__":
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=opened(Path(sys.argv[1])).case.clients,
        backend_config={
            "init_args": {"num_cpus": int(sys.argv[3]), "log_to_driver": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},  # the default is 2 for each client
        },
    )
