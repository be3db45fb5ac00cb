"""The other side of an external trainer: serves a worker with a `Trainer`, over standard input and output."""

import os
import queue
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from federation.owners_code import headline, passes, without_exit
from federation.spec.computation import Ability
from federation.tasks import DataSource, Loading, Part, Task, task
from federation.training import TrainingDiverged, TrainingStopped
from federation.training.pipe import PROTOCOL, Header, Messages
from federation.training.plans import EvaluationPlan
from federation.training.reasons import reason_of
from federation.training.trainer import Trainer
from federation.training.trainers import close_trainer, make_trainer, trainer_kind
from federation.training.training_json import plan_of
from federation.vectors import Array, Vector
from federation.work.base import WorkError

if TYPE_CHECKING:
    from federation.training.distributed import DistributedTrainer
    from federation.training.ranks import Ranks


class _Served:
    """One worker that is served. What others print goes to standard error, so that it cannot spoil the messages."""

    def __init__(self, name: str, ranks: "Ranks | None") -> None:
        source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        self._name, self._ranks = name, ranks
        self._messages = Messages(source, sink, sys.maxsize, sys.maxsize)
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
            except BaseException as error:  # a script may end with sys.exit()
                if passes(error):
                    raise
                traceback.print_exc()
                message = str(error) if isinstance(error, WorkError) else headline(error)
                answer = {"type": "error", "id": number, "reason": reason_of(error), "message": message}
                if self._ranks is None:
                    self._messages.write(answer)
                    continue
                # The other processes wait for this one in the middle of an order, and end with it.
                self._messages.write({**answer, "ends": True})
                os._exit(1)
        if trainer is not None:
            close_trainer(trainer)

    def _read(self) -> None:
        try:
            while (message := self._messages.read()) is not None:
                if message[0]["type"] == "stop":
                    self._stopped = message[0]["id"]
                else:
                    self._orders.put(message)
        finally:  # after a PipeError, too
            self._ended = True
            self._orders.put(None)

    def _prepared(self, header: Header) -> Trainer:
        if (header.get("type"), header.get("protocol")) != ("prepare", PROTOCOL):
            raise ValueError(f"the worker speaks another protocol: {str(header)[:200]}")
        if self._ranks is not None:
            self._ranks.tell(header)
        trainer = _made(header, self._name, self._ranks)
        trainer.try_out()
        self._messages.write(
            {
                "type": "ready",
                "id": 0,
                "samples": dict(trainer.sizes),
                "abilities": sorted(trainer.abilities),
                "measures": sorted(trainer.measured),
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
                if header["private"] is not None:
                    trainer.check_private()
                plan = plan_of(
                    header,
                    trainer.samples,
                    stopped,
                    lambda share: self._messages.write({"type": "progress", "id": number, "share": share}),
                )
                self._reply(trainer, {"type": "model", "id": number}, [trainer.trained(model, plan)])
            case "gradients":
                gradients = trainer.differentiated(model, header["batch_size"], header["seed"])
                self._reply(trainer, {"type": "gradients", "id": number}, list(gradients.values()))
            case "evaluate":
                wanted = EvaluationPlan(split=header["split"], metrics=tuple(header["metrics"]), stopped=stopped)
                self._reply(trainer, {"type": "scores", "id": number, "scores": trainer.scored(model, wanted)})
            case other:
                raise ValueError(f"an unknown order: {other[:40]!r}")

    def _reply(self, trainer: Trainer, answer: Header, vectors: Sequence[Array] = ()) -> None:
        """Writes an answer, and whether the trainer can still repeat its work, which the work may have changed."""
        self._messages.write({**answer, "repeatable": Ability.REPEATABLE in trainer.abilities}, vectors)


def _made(header: Header, name: str, ranks: "Ranks | None") -> Trainer:
    """The trainer that a worker asks for.

    Raises:
        ValueError: the task has other tensors here, or a trainer that cannot work in several processes.
    """
    learned: Task = task(header["task"])
    kind = trainer_kind(learned, name)
    part = None if header["part"] is None else Part(**header["part"])
    source = DataSource(
        None if header["data"] is None else Path(header["data"]), part, header["download"], Loading(**header["loading"])
    )
    data = kind.load(learned, source)
    given = (learned, data, header["device"], header["threads"], tuple(header["objectives"]))
    trainer = make_trainer(kind, *given) if ranks is None else _together(kind, ranks)(*given, ranks=ranks)
    tensors = [{"name": tensor.name, "shape": list(tensor.shape)} for tensor in trainer.layout.tensors]
    if tensors != header["tensors"]:
        raise ValueError("the task has other tensors here than at the worker: compare versions")
    return trainer


def _together(kind: type[Trainer], ranks: "Ranks") -> "type[DistributedTrainer]":
    from federation.training.distributed import DistributedTrainer  # noqa: PLC0415 - trainers need no PyTorch
    from federation.training.torch_trainer import TorchTrainer  # noqa: PLC0415

    if kind is not TorchTrainer:
        raise ValueError(f"{kind.__name__} works in one process; there are {ranks.count} (processes)")
    return DistributedTrainer


def _ranks(environment: Mapping[str, str]) -> "Ranks | None":
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    from federation.training.ranks import Ranks  # noqa: PLC0415 - trainers need no PyTorch

    return Ranks.of(environment)


def serve(name: str, environment: Mapping[str, str]) -> None:
    """Serves the worker that started this process, until it closes standard input.

    `name` is that of a trainer, as `trainer_kind` takes it; empty for the task's own. If `torchrun` started the
    process, as `environment` says, this is one of several processes, and the first one serves the worker.
    """
    ranks = _ranks(environment)
    if ranks is not None:
        ranks.meet()
        if ranks.rank > 0:
            from federation.training.distributed import follow  # noqa: PLC0415

            os.dup2(2, 1)  # the messages are those of the first process
            with without_exit(WorkError):
                follow(ranks, lambda header: _made(header, name, ranks))
            return
    with suppress(BrokenPipeError):  # the worker has ended in the middle of an order
        _Served(name, ranks).run()
