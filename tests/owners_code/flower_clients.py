"""Flower clients of the tasks in `flower_tasks.py`. They write what they were given into the member's directory."""

import json
from pathlib import Path
from typing import Any

import flwr.supercore.telemetry as flower_telemetry
from flwr.app import Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp


class Halving(NumPyClient):  # type: ignore[misc]
    def __init__(self, context: Context) -> None:
        self.context = context

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        context = self.context
        told = {
            "config": dict(config),
            "run_config": dict(context.run_config),
            "node_config": dict(context.node_config),
            "state": len(context.state),
            "telemetry": flower_telemetry.FLWR_TELEMETRY_ENABLED,
            "types": [str(array.dtype) for array in parameters],
        }
        Path(context.node_config["data-path"], "told.json").write_text(json.dumps(told))
        return [array / 2 if array.dtype.kind == "f" else array + 2 for array in parameters], 12, {}

    def evaluate(self, parameters: list[Any], config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        return float(sum(abs(array).sum() for array in parameters)), 5, {"accuracy": 0.25}


class Disordered(Halving):
    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        return [*parameters[-2:], *parameters[2:-2], *parameters[:2]], 12, {}


class Short(Halving):
    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        return parameters[:4], 12, {}


def client_fn(context: Context) -> Any:
    return Halving(context).to_client()


disordered = ClientApp(client_fn=lambda context: Disordered(context).to_client())
short = ClientApp(client_fn=lambda context: Short(context).to_client())
