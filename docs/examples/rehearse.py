"""Rehearses a task in one process, before a federation exists: python rehearse.py clinic:Tumours."""

import sys

import numpy as np

from coordinator.aggregation import aggregate
from federation.tasks import DataSource, Part, initial_model, task
from federation.training import Trainer, TrainWork

MEMBERS, ROUNDS = 5, 60

learned = task(sys.argv[1])
parts = [Part(index, MEMBERS, scheme="dirichlet:0.5") for index in range(MEMBERS)]
trainers = [Trainer(learned, learned.load(DataSource(part=part))) for part in parts]
work = TrainWork(epochs=1, batch_size=10, learning_rate=0.1)
_, model = initial_model(learned, seed=0)

for round_ in range(ROUNDS):
    results = [
        trainer.train(model, work, seed=0, round=round_, client_id=f"member-{index}")
        for index, trainer in enumerate(trainers)
    ]
    updates = np.stack([result.rows["loss"] for result in results])
    step = aggregate("fedmgda+", updates, samples=[result.samples for result in results])
    model = (model - 0.1 * step.direction).astype(np.float32)

for index, trainer in enumerate(trainers):
    measured = trainer.evaluate(model)
    print(f"member-{index}: {trainer.samples} training samples, test accuracy {measured['test/accuracy']:.2f}")
