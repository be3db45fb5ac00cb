"""The task that brings the Flower app into a federation. This file imports nothing of Flower."""

from flower_net import Net, load_data

from fedpareto import DataSource
from fedpareto.adapters.flower import FlowerTask


class Digits(FlowerTask):
    app = "flower_app:app"
    run_config = {"local-epochs": 1, "batch-size": 32}  # noqa: RUF012
    model = staticmethod(Net)

    def samples(self, source: DataSource):
        train, validation = load_data(source.part.index, source.part.count)
        return {"train": len(train[0]), "validation": len(validation[0])}
