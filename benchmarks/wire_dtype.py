"""Updates in bfloat16 beside float32: the bytes that members send, and the accuracy of the last model.

FedAvg with ten clients, each with samples of about two classes. The accuracy is the mean over the clients'
test splits; the seeds are those of the runs, which also cut the data.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from fedpareto.notebook import simulate

RUN = """
name = "wire"
task = "{task}"
rounds = {rounds}
seed = {seed}
algorithm.name = "fedavg"
train = {{ steps = 20, batch_size = 50, learning_rate = 0.1, measure = false, wire_dtype = "{dtype}" }}
evaluate = {{ every = 0, splits = ["test"] }}
simulation = {{ clients = {clients}, partition = "shards:2" }}
"""
DTYPES = ("float32", "bf16")
ROUNDS = {"digits": 25, "adult": 10, "mnist": 10}


def measure(task: str, data: Path | None, seeds: range, rounds: int, clients: int) -> dict[str, Any]:
    """Accuracies by type and seed, and the bytes that all clients send in one round."""
    found: dict[str, Any] = {"task": task, "rounds": rounds, "accuracy": {}, "bytes": {}}
    for dtype in DTYPES:
        texts = [RUN.format(task=task, rounds=rounds, seed=seed, dtype=dtype, clients=clients) for seed in seeds]
        runs = [simulate(text.encode(), data=data, threads=1) for text in texts]
        found["parameters"] = len(runs[0].model)
        found["accuracy"][dtype] = [run.round_records[-1]["accuracy/mean"] for run in runs]
        found["bytes"][dtype] = float(runs[0].rounds["bytes/up"].iloc[0])
    return found


def spread(values: list[float]) -> str:
    """Mean and standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):7.4f} +- {deviation:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="with Adult and MNIST, which are measured too")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--smallest", action="store_true", help="two clients, one round")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    most, clients = (1, 2) if options.smallest else (3 if options.quick else 25, 10)
    seeds = range(1 if options.smallest else options.seeds)
    table = []
    for task in ROUNDS if options.data else ["digits"]:
        rounds = min(most, ROUNDS[task])
        found = measure(task, options.data if task != "digits" else None, seeds, rounds, clients)
        table.append(found)
        if options.json:
            continue
        print(f"{task}, {found['parameters']} parameters, {rounds} rounds")
        full, half = (found["accuracy"][dtype] for dtype in DTYPES)
        for dtype, values in zip(DTYPES, (full, half), strict=True):
            print(f"  {dtype:7}  {spread(values)}  {found['bytes'][dtype] / 1e3:9.1f} kB up a round")
        difference = spread([a - b for a, b in zip(half, full, strict=True)])
        ratio = found["bytes"]["bf16"] / found["bytes"]["float32"]
        print(f"  bf16 - float32: {difference}; {ratio:.3f} times the bytes", flush=True)
    if options.json:
        json.dump(table, sys.stdout)
        print()


if __name__ == "__main__":
    main()
