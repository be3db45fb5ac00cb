"""A trainer that runs as a process of its own, in any language; docs/start/your-own-trainer.md has the protocol."""

import os
import queue
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from reprlib import repr as shortened
from typing import Any, NoReturn, TypeGuard

from federation.owners_code import place
from federation.spec.computation import SPLITS, Ability
from federation.tasks import DataSource, Task
from federation.text import escaped
from federation.training import TrainingDiverged, TrainingStopped
from federation.training.pipe import FLOAT, PROTOCOL, Header, Messages, PipeError
from federation.training.plans import EvaluationPlan, TrainingPlan
from federation.training.trainer import Trainer
from federation.training.training_json import training_order
from federation.vectors import Array, Vector
from federation.work.base import WorkError

SILENCE_SECONDS = 600.0
_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 10.0  # for a stop, and for the end
_QUIET_SECONDS = 2.0  # for an end without a signal
_REASON = re.compile(r"[a-z][a-z0-9:-]{0,60}")
_MAX_COUNT = 2**53  # each smaller integer is a float64, and fits into a message to the coordinator

_Item = tuple[Header, Vector] | PipeError | None


class _Process:
    """The process, with a thread that reads its messages and one that writes ours."""

    def __init__(self, command: Sequence[str], most: int) -> None:
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self.popen.stdin is not None and self.popen.stdout is not None  # noqa: S101, PT018
        self._messages = Messages(self.popen.stdout, self.popen.stdin, most)
        # One message waits here, and one more in the reader: a process that writes more is blocked by its full pipe.
        self.inbox: queue.Queue[_Item] = queue.Queue(maxsize=1)
        self._over = threading.Event()
        # A thread writes, so that a process that does not read cannot block the worker.
        self._outbox: queue.SimpleQueue[tuple[Header, Sequence[Array]] | None] = queue.SimpleQueue()
        for work in (self._read, self._write):
            threading.Thread(target=work, daemon=True).start()

    def _read(self) -> None:
        try:
            while not self._over.is_set() and (item := self._messages.read()) is not None:
                self._deliver(item)
        except (PipeError, OSError) as error:
            self._deliver(PipeError(str(error)))
        self._deliver(None)
        self._messages.source.close()

    def _deliver(self, item: _Item) -> None:
        """Waits until there is room in the inbox, or the process is being ended."""
        while not self._over.is_set():
            with suppress(queue.Full):
                return self.inbox.put(item, timeout=_LOOK_SECONDS)

    def _write(self) -> None:
        with suppress(OSError):  # the process has ended; the reader reports it
            while (message := self._outbox.get()) is not None:
                self._messages.write(*message)
        with suppress(OSError):
            self._messages.sink.close()

    def send(self, header: Header, vectors: Sequence[Array] = ()) -> None:
        """Sends a message, after those before it."""
        self._outbox.put((header, vectors))

    def ending(self) -> str:
        """The end of the process, as text."""
        try:
            status = self.popen.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its output"
        return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"

    def end(self, grace: float) -> None:
        """Closes its input; some seconds later sends SIGTERM to it and its children, and at last SIGKILL."""
        self._over.set()
        self._outbox.put(None)
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(_QUIET_SECONDS)
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.popen.pid, number)
            except ProcessLookupError:
                break
            try:
                self.popen.wait(grace)
            except subprocess.TimeoutExpired:
                continue


class ExternalTrainer(Trainer):
    """Has a process train and evaluate. It is started with the worker, and again after it has ended.

    The process reads its data from the data source. Failures are WorkErrors with the reasons `trainer:start`,
    `trainer:died`, `trainer:silent`, `trainer:protocol`, `trainer:result` and `trainer:error`.
    """

    def __init__(
        self,
        task: Task,
        data: DataSource,
        device: str = "auto",
        threads: int | None = None,
        objectives: Sequence[str] | None = None,
        *,
        command: str,
        silence: float = SILENCE_SECONDS,
    ) -> None:
        """Starts the command, a line as a shell takes it.

        After `silence` seconds without a message during work or preparation, the process counts as dead and is
        ended.

        Raises:
            WorkError: it cannot be started, or it does not get ready.
        """
        self._command, self._silence = shlex.split(command), silence
        self._process: _Process | None = None
        self._asked = device
        self._count = 0
        super().__init__(task, data, device, threads, objectives)

    @classmethod
    def load(cls, task: Task, source: DataSource) -> DataSource:
        """The source: the process loads the data."""
        return source

    def prepare(self) -> None:
        """Starts the process, and has it load the data."""
        self._start()

    @property
    def sizes(self) -> Mapping[str, int]:
        """The number of samples of each split, as the process reports them."""
        return self._sizes

    @property
    def measured(self) -> frozenset[str]:
        """The splits that the process can measure."""
        return self._measured

    def train(self, model: Vector, plan: TrainingPlan) -> Vector:
        """Trains in the process."""
        order = training_order(plan)
        return self._vectors(self._ask({"type": "train", **order}, "model", model, plan.stopped, plan.tell), 1)[0]

    def gradients(self, model: Vector, batch_size: int, seed: int) -> dict[str, Vector]:
        """The gradients, from the process."""
        order = {"type": "gradients", "batch_size": batch_size, "seed": seed}
        answer = self._ask(order, "gradients", model, lambda: False)
        return dict(zip(self.objectives, self._vectors(answer, len(self.objectives)), strict=True))

    def evaluate(self, model: Vector, plan: EvaluationPlan) -> Any:
        """Evaluates in the process; the scores are what it sent, of any kind."""
        order = {"type": "evaluate", "split": plan.split, "metrics": list(plan.metrics)}
        header, _ = self._ask(order, "scores", model, plan.stopped)
        return header.get("scores")

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.end(_GRACE_SECONDS)
            self._process = None

    def _start(self) -> _Process:
        floats = self.layout.size * max(1, len(self.objectives))
        try:
            self._process = _Process(self._command, floats * FLOAT.itemsize)
        except OSError as error:
            wire = f"the trainer's command cannot be started: {place(error)}"
            raise WorkError(
                f"the trainer's command {self._command}: {error}", reason="trainer:start", wire=wire
            ) from error
        source = self.data
        order = {
            "type": "prepare",
            "protocol": PROTOCOL,
            "task": self.task.name,
            "objectives": list(self.objectives),
            "tensors": [{"name": tensor.name, "shape": list(tensor.shape)} for tensor in self.layout.tensors],
            "data": None if source.directory is None else str(source.directory),
            "part": None if source.part is None else asdict(source.part),
            "download": source.download,
            "loading": asdict(source.loading),
            "device": self._asked,
            "threads": self.threads,
        }
        self._process.send(order)
        try:
            header, _ = self._answer(self._process, 0, "ready", lambda: False)
        except WorkError:
            self.close()
            raise
        samples, abilities = header.get("samples"), header.get("abilities", [])
        counts = isinstance(samples, dict) and all(_is_count(samples.get(name, 0)) for name in SPLITS)
        if not counts or not isinstance(abilities, list) or not all(ability in [*Ability] for ability in abilities):
            unready = f"said it is ready without samples by split, or with abilities other than {', '.join(Ability)}"
            self._fail("trainer:protocol", f"{unready}: {shortened(header)}", wire=unready)
        measures = header.get("measures", [*SPLITS])
        if not isinstance(measures, list) or not all(split in SPLITS for split in measures):
            unready = f"said it measures other splits than {', '.join(SPLITS)}"
            self._fail("trainer:protocol", f"{unready}: {shortened(header)}", wire=unready)
        self._measured = frozenset(measures)
        self._sizes = {name: (samples or {}).get(name, 0) for name in SPLITS}
        self.abilities = frozenset(abilities)
        self.device = escaped(_text(header, "device"), 80) or "external"
        return self._process

    def _ask(
        self,
        order: Header,
        kind: str,
        model: Vector,
        stopped: Callable[[], bool],
        tell: Callable[[float], None] = lambda share: None,
    ) -> tuple[Header, Vector]:
        """Sends an order and the model, and waits for the answer of this kind."""
        process = self._process or self._start()
        self._count += 1
        process.send({**order, "id": self._count}, [model])
        return self._answer(process, self._count, kind, stopped, tell)

    def _answer(
        self,
        process: _Process,
        number: int,
        kind: str,
        stopped: Callable[[], bool],
        tell: Callable[[float], None] = lambda share: None,
    ) -> tuple[Header, Vector]:
        """The answer to the order of this number. Raises WorkError, TrainingDiverged or TrainingStopped."""
        last_message, stopping = time.monotonic(), False
        while True:
            if not stopping and stopped():
                process.send({"type": "stop", "id": number})
                last_message, stopping = time.monotonic(), True
            # Messages of other orders, and progress after a stop, do not count.
            if time.monotonic() - last_message > (_GRACE_SECONDS if stopping else self._silence):
                if stopping:
                    self.close()
                    raise TrainingStopped
                self._fail("trainer:silent", f"said nothing about its order for {self._silence:g} s")
            try:
                item = process.inbox.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                continue
            if item is None:
                self._fail("trainer:died", process.ending())
            if isinstance(item, PipeError):
                self._fail("trainer:protocol", f"sent an invalid message: {item}", wire="sent an invalid message")
            header, floats = item
            if header.get("id", 0) != number:
                continue  # the answer to an abandoned order
            if stopping and header["type"] != "progress":
                raise TrainingStopped
            match header["type"]:
                case "progress":
                    if not stopping:
                        last_message = time.monotonic()
                    if _is_number(share := header.get("share")):
                        tell(min(max(0.0, float(share)), 1.0))  # in this order, NaN is 0
                case "diverged":
                    step = header.get("step")
                    raise TrainingDiverged(step if _is_count(step) else 1)
                case "error":
                    reason, message = _text(header, "reason"), " ".join(_text(header, "message").split())
                    if header.get("ends") is True:
                        self.close()
                    raise WorkError(
                        f"the process of the trainer failed: {escaped(message, 400)}",
                        reason=reason if _REASON.fullmatch(reason) else "trainer:error",
                        wire="the process of the trainer failed",
                    )
                case answered if answered == kind:
                    if header.get("repeatable", True) is not True:
                        self.abilities -= {Ability.REPEATABLE}
                    return header, floats
                case answered:
                    other = f"answered something else where {kind!r} is needed"
                    self._fail("trainer:protocol", f"answered {answered[:40]!r} where {kind!r} is needed", wire=other)

    def _vectors(self, answer: tuple[Header, Vector], count: int) -> list[Vector]:
        """The vectors (d,) that follow an answer."""
        _, floats = answer
        if len(floats) != count * self.layout.size:
            raise WorkError(
                f"the process of the trainer returned {len(floats)} numbers; {count} times "
                f"{self.layout.size} are needed",
                reason="trainer:result",
            )
        return list(floats.reshape(count, self.layout.size))

    def _fail(self, reason: str, failure: str, *, wire: str = "") -> NoReturn:
        """Ends the process; the next order starts it again. Raises WorkError; `wire` is what others are told."""
        self.close()
        subject = "the process of the trainer"
        raise WorkError(f"{subject} {failure}", reason=reason, wire=wire and f"{subject} {wire}")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_COUNT


def _text(header: Header, key: str) -> str:
    """The text of a key; empty if it is missing or something else."""
    return text if isinstance(text := header.get(key), str) else ""
