"""An external trainer in plain Python, without fedpareto: logistic regression on tumours.csv in the data directory.

    fedpareto worker run ... --task scikit:Tumours --data DIR --set "trainer_command=python plain_trainer.py"

A model is 31 numbers: the weights of 30 measurements, and the bias.
"""

import array
import csv
import json
import math
import os
import random
import select
import sys

source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # print() goes to standard error


def write(header, model=None):
    data = b"" if model is None else array.array("f", model).tobytes()
    sink.write(json.dumps({**header, "bytes": len(data)}).encode() + b"\n" + data)
    sink.flush()


def read():
    line = source.readline()
    if not line:
        sys.exit()  # the worker has ended
    header = json.loads(line)
    return header, array.array("f", source.read(header.get("bytes", 0)))


def load(directory):
    """Samples of each split: 30 measurements, and 0 or 1."""
    with open(os.path.join(directory, "tumours.csv"), newline="") as file:
        rows = [[float(value) for value in row] for row in list(csv.reader(file))[1:]]
    samples = [([math.log(value + 1e-3) for value in row[:30]], row[30]) for row in rows]
    tenth = max(1, len(samples) // 10)
    return {
        "test": samples[:tenth],
        "validation": samples[tenth : 2 * tenth],
        "train": samples[2 * tenth :],
    }


def probability(model, x):
    z = sum(map(float.__mul__, model, x)) + model[30]
    return 1 / (1 + math.exp(-max(-500.0, min(500.0, z))))


def train(order, model, samples):
    """Steps of SGD, each on the mean loss of a minibatch; None if the worker says something meanwhile."""
    sgd, draw = order["sgd"], random.Random(order["seed"])
    size = sgd["batch_size"] or len(samples)
    steps_a_pass = math.ceil(len(samples) / size)
    steps = sgd["steps"] or sgd["epochs"] * steps_a_pass
    for step in range(steps):
        place = step % steps_a_pass * size
        if place == 0:
            shuffled = draw.sample(samples, len(samples))
        errors = [(probability(model, x) - y, x) for x, y in shuffled[place : place + size]]
        rate = sgd["learning_rate"] / len(errors)
        for at in range(30):
            model[at] -= rate * sum(error * x[at] for error, x in errors)
        model[30] -= rate * sum(error for error, _ in errors)
        write({"type": "progress", "id": order["id"], "share": (step + 1) / steps})
        if select.select([source], [], [], 0)[0]:  # the worker says something: "stop", or its end
            read()
            return None
    return model


def evaluate(model, samples):
    found = [(probability(model, x), y) for x, y in samples]
    loss = -sum(math.log(max(1e-12, p if y else 1 - p)) for p, y in found) / len(found)
    return {"loss": loss, "accuracy": sum((p > 0.5) == (y > 0.5) for p, y in found) / len(found)}


order, _ = read()
data = load(order["data"])
samples = {name: len(part) for name, part in data.items()}
write({"type": "ready", "id": 0, "samples": samples, "abilities": ["repeatable"]})
while True:
    order, floats = read()
    model = list(floats)
    if order["type"] == "train":
        trained = train(order, model, data["train"])
        answer = {"type": "stopped" if trained is None else "model", "id": order["id"]}
        write(answer, trained)
    elif order["type"] == "evaluate":
        write({"type": "scores", "id": order["id"], "scores": evaluate(model, data[order["split"]])})
