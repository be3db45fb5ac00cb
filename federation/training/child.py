"""The other side of an external trainer: serves a worker with a `Trainer`, over standard input and output."""

import os
import queue
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path

from federation.tasks import DataSource, Part, Task, task
from federation.training import TrainingDiverged, TrainingStopped
from federation.training.pipe import PROTOCOL, Header, Messages
from federation.training.plans import EvaluationPlan, TrainingPlan
from federation.training.trainer import Trainer
from federation.training.trainers import trainer_kind
from federation.vectors import Vector
from federation.work.base import WorkError
from federation.work.computation import LocalSgd, PrivateSgd


class _Served:
    """One worker that is served. What others print goes to standard error, so that it cannot spoil the messages."""

    def __init__(self, name: str) -> None:
        source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        self._name = name
        self._messages = Messages(source, sink, sys.maxsize)
        self._orders: queue.SimpleQueue[tuple[Header, Vector] | None] = queue.SimpleQueue()
        self._stopped = -1  # the order that is no longer wanted
        self._ended = False

    def run(self) -> None:
        """Until the worker ends the stream."""
        threading.Thread(target=self._read, daemon=True).start()
        trainer: Trainer | None = None
        while (order := self._orders.get()) is not None and not self._ended:
            header, model = order
            number = header.get("id", 0)
            try:
                if trainer is None:
                    trainer = self._prepared(header)
                else:
                    self._answer(trainer, header, model)
            except TrainingDiverged as error:
                self._messages.write({"type": "diverged", "id": number, "step": error.step})
            except TrainingStopped:
                self._messages.write({"type": "stopped", "id": number})
            except Exception as error:
                traceback.print_exc()
                reason = error.reason if isinstance(error, WorkError) else ""
                message = f"{type(error).__name__}: {error}"
                self._messages.write({"type": "error", "id": number, "reason": reason, "message": message})
        if trainer is not None:
            trainer.close()

    def _read(self) -> None:
        while (message := self._messages.read()) is not None:
            if message[0]["type"] == "stop":
                self._stopped = message[0]["id"]
            else:
                self._orders.put(message)
        self._ended = True
        self._orders.put(None)

    def _prepared(self, header: Header) -> Trainer:
        if (header.get("type"), header.get("protocol")) != ("prepare", PROTOCOL):
            raise ValueError(f"the worker speaks another protocol: {str(header)[:200]}")
        learned: Task = task(header["task"])
        kind = trainer_kind(learned, self._name)
        part = None if header["part"] is None else Part(**header["part"])
        source = DataSource(None if header["data"] is None else Path(header["data"]), part, header["download"])
        data = kind.load(learned, source)
        trainer = kind(learned, data, header["device"], header["threads"], tuple(header["objectives"]))
        tensors = [{"name": tensor.name, "shape": list(tensor.shape)} for tensor in trainer.layout.tensors]
        if tensors != header["tensors"]:
            raise ValueError("the task has other tensors here than at the worker: compare versions")
        trainer.try_out()
        self._messages.write(
            {
                "type": "ready",
                "id": 0,
                "samples": dict(trainer.sizes),
                "abilities": sorted(trainer.abilities),
                "device": trainer.device,
            }
        )
        return trainer

    def _answer(self, trainer: Trainer, header: Header, model: Vector) -> None:
        """Does an order, and writes the answer."""
        number: int = header["id"]

        def stopped() -> bool:
            return self._ended or self._stopped == number

        match header["type"]:
            case "train":
                private = header["private"]
                if private is not None:
                    trainer.must_be_private()
                plan = TrainingPlan(
                    sgd=LocalSgd(**header["sgd"]),
                    weights=header["weights"],
                    seed=header["seed"],
                    samples=trainer.samples,
                    from_gradients=header["from_gradients"],
                    private=None if private is None else PrivateSgd(**private),
                    frozen=tuple(slice(*part) for part in header["frozen"]),
                    stopped=stopped,
                    tell=lambda share: self._messages.write({"type": "progress", "id": number, "share": share}),
                )
                self._messages.write({"type": "model", "id": number}, [trainer.train(model, plan)])
            case "gradients":
                found = trainer.gradients(model, header["batch_size"], header["seed"])
                self._messages.write({"type": "gradients", "id": number}, [found[name] for name in trainer.objectives])
            case "evaluate":
                wanted = EvaluationPlan(split=header["split"], metrics=tuple(header["metrics"]), stopped=stopped)
                scores = {name: float(value) for name, value in trainer.evaluate(model, wanted).items()}
                self._messages.write({"type": "scores", "id": number, "scores": scores})
            case other:
                raise ValueError(f"an unknown order: {other[:40]!r}")


def serve(name: str = "") -> None:
    """Serves the worker that started this process, until it closes standard input.

    `name` is that of a trainer, as `trainer_kind` takes it; empty for the task's own.
    """
    with suppress(BrokenPipeError):  # the worker has ended in the middle of an order
        _Served(name).run()
