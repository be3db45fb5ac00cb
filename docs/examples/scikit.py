"""Logistic regression by scikit-learn, without PyTorch: the model is a vector of weights and biases.

Is a tumour malignant? Thirty measurements of cell nuclei, from the data set that scikit-learn brings (Wolberg, Street,
Mangasarian 1995).
"""

import warnings

import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, SGDClassifier
from sklearn.metrics import log_loss

from fedpareto import DataSource, Pool, Task, Trainer


class ScikitTrainer(Trainer):
    """What both trainers share: any classifier with coef_ and intercept_ is evaluated in the same way."""

    abilities = frozenset({"repeatable"})

    def classifier(self, model, kind, **parameters):
        """A classifier that starts from a model."""
        made = kind(**parameters)
        made.classes_ = np.array([0, 1])
        arrays = self.arrays(model)
        made.coef_, made.intercept_ = arrays["coef"].astype(float), arrays["intercept"].astype(float)
        return made

    def evaluate(self, model, plan):
        data = getattr(self.data, plan.split)
        made = self.classifier(model, LogisticRegression)
        probabilities = made.predict_proba(data.x)
        return {
            "loss": log_loss(data.y, probabilities, labels=made.classes_),
            "accuracy": np.mean(probabilities.argmax(axis=1) == data.y),
        }


class PartialFit(ScikitTrainer):
    """Steps of SGD: `partial_fit` on each minibatch."""

    def train(self, model, plan):
        rates = {"learning_rate": "constant", "eta0": plan.sgd.learning_rate, "alpha": 0.0}
        made = self.classifier(model, SGDClassifier, loss="log_loss", shuffle=False, **rates)
        x, y = self.data.train.x, self.data.train.y
        for batch in plan.minibatches():
            made.partial_fit(x[batch], y[batch], classes=made.classes_)
        return self.vector({"coef": made.coef_, "intercept": made.intercept_})


class Newton(ScikitTrainer):
    """Iterations of Newton's method on all samples, one for each epoch."""

    def train(self, model, plan):
        settings = {"solver": "newton-cholesky", "warm_start": True, "max_iter": plan.sgd.epochs or plan.sgd.steps}
        made = self.classifier(model, LogisticRegression, **settings)
        with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):  # a few iterations are meant
            made.fit(self.data.train.x, self.data.train.y)
        return self.vector({"coef": made.coef_, "intercept": made.intercept_})


class Tumours(Task):
    trainer = PartialFit

    def initial(self, seed):
        return {"coef": np.zeros((1, 30)), "intercept": np.zeros(1)}

    def pool(self, source: DataSource) -> Pool:
        x, y = load_breast_cancer(return_X_y=True)
        return Pool(np.log(x + 1e-3), y)
