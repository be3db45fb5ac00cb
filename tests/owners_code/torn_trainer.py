"""A trainer with a defect: it measures the model that a run with the seed 5 starts from, and no other."""

from federation.tasks import initial_model
from federation.training.plans import EvaluationPlan
from federation.training.torch_trainer import TorchTrainer
from federation.vectors import Vector


class Torn(TorchTrainer):
    def evaluate(self, model: Vector, plan: EvaluationPlan) -> dict[str, float]:
        first = initial_model(self.task, 5)[1]
        return super().evaluate(model, plan) if (model == first).all() else {"no loss": 1.0}
