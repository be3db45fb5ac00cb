"""Rehearses a task with five simulated members, before a federation exists: python rehearse.py clinic:Tumours."""

import sys

from fedpareto import simulate

SPEC = """
name = "rehearsal"
task = "TASK"
rounds = 60

[server]
learning_rate = 0.1

[evaluate]
every = 0                      # only after the last round

[simulation]
clients = 5
partition = "dirichlet:0.5"    # unequal data
"""

history = simulate(SPEC.replace("TASK", sys.argv[1]), threads=1)
for record in history.client_records:
    if record["split"] == "test":
        print(f"{record['client']}: {record['samples']} test samples, accuracy {record['accuracy']:.2f}")
