"""Loads a model that `fedpareto admin export` wrote into PyTorch: python use_the_model.py model.safetensors digits."""

import sys

import torch
from safetensors.torch import load_file

from fedpareto import DataSource, task

path, name = sys.argv[1:3]
learned = task(name)
model = learned.model()
model.load_state_dict(load_file(path))
model.eval()

test = learned.load(DataSource()).test
with torch.no_grad():
    right = learned.correct(model(test.x), test.y)
print(f"{len(test)} samples of the test split, accuracy {right.float().mean():.3f}")
torch.save(model.state_dict(), "model.pt")
