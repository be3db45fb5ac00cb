"""A run of a federation: its state, its history and its model, by the calls that the commands make."""

import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from federation.errors import ArgumentError, Error
from federation.text import counted
from federation.v1 import admin_pb2 as v1
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import RunState
from federation.vectors import Layout, Vector, read_vector
from fedpareto.admin_messages import name_of
from fedpareto.cli.admin import watch
from fedpareto.cli.admin.download import save
from fedpareto.progress_line import shown
from fedpareto.run_names import ENDED
from fedpareto.simulation.history import History, history_of, tensors
from fedpareto.simulation.simulation_progress import SimulationProgress
from fedpareto.web.pages.html import Html
from fedpareto.web.report import framed, page
from fedpareto.web.sections.shown_run import ShownRun

if TYPE_CHECKING:
    import torch

    from federation.tasks import Task

Calls = Callable[[], AbstractContextManager[AdminStub]]


class RunReport(str):
    """The report of a run, one HTML page; a notebook shows it as a part of its output."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return framed(Html(self))

    def save(self, path: str | Path) -> None:
        """Writes the page to a file. Raises OSError: it cannot be written."""
        Path(path).write_text(self, encoding="utf-8")


class FederatedRun:
    """A run of a federation. Each call asks the coordinator anew, with the administrator's certificate.

    Attributes:
        run_id: its id.
        name: its name, which other runs may have, too.
        warnings: what the coordinator remarked when the run was submitted here.
    """

    def __init__(
        self, calls: Calls, run: v1.Run, *, task: "type[Task] | None" = None, warnings: tuple[str, ...] = ()
    ) -> None:
        self._calls = calls
        self._run = run  # as it was last read
        self._task = task
        self.run_id, self.name = run.run_id, run.name
        self.warnings = warnings

    def __repr__(self) -> str:
        """The run as it was last read."""
        run = self._run
        reason = f", {run.reason}" if run.reason else ""
        first = f"{self.name} (run {self.run_id}): {name_of(run, 'state')}{reason}, {run.rounds_done} of "
        return "\n".join(
            [first + counted(run.rounds_total, "round"), *(f"  warning: {text}" for text in self.warnings)]
        )

    @property
    def state(self) -> str:
        """RUNNING, PAUSED, COMPLETED, FAILED or STOPPED."""
        with self._calls() as stub:
            self._run = stub.GetRun(v1.GetRunRequest(run=self.run_id, brief=True)).run
        return name_of(self._run, "state")

    def wait(self, progress: bool | Callable[[SimulationProgress], object] = True) -> Self:
        """Waits until the run is completed, also across restarts of the coordinator.

        An interruption (Ctrl-C, or the notebook's stop button) ends the waiting, and not the run.

        Args:
            progress: True shows a line in a notebook and a bar on a terminal; a function is called after every round.

        Raises:
            Error: the run failed, was stopped or paused, or the coordinator refuses; the message says why.
        """
        with ExitStack() as stack:
            tell = progress if callable(progress) else stack.enter_context(shown()) if progress else None
            stub = stack.enter_context(self._calls())
            began, first, last = time.perf_counter(), -1, -1
            for message in watch.messages(stub, self.run_id, lambda text: warnings.warn(text, stacklevel=3)):
                self._run = run = message.run
                first = run.rounds_done if first < 0 else first
                if tell is not None and run.rounds_done > max(last, 0):
                    latest, passed = run.latest, time.perf_counter() - began
                    metrics = dict(latest.metrics)
                    rate = (run.rounds_done - first) / passed if passed > 0 else 0.0
                    tell(SimulationProgress(run.rounds_done, run.rounds_total, metrics, rate, latest.undisclosed))
                    last = run.rounds_done
                if run.state == RunState.RUN_STATE_PAUSED:
                    raise Error(
                        f"run {self.run_id} is paused: {run.reason or 'an administrator paused it'}; see resume()"
                    )
        if problem := watch.not_completed(self._run):
            raise Error(problem)
        return self

    @property
    def history(self) -> History:
        """The run up to now: its tables, its picture and its newest model.

        Without the model, where the administrator may not export it or the coordinator does not run; then the last of
        its `warnings` says so.
        """
        with self._calls() as stub:
            self._run = run = stub.GetRun(v1.GetRunRequest(run=self.run_id, choice=v1.RUN_CHOICE_ONLY)).run
            rounds = list(stub.ExportRounds(v1.ExportRoundsRequest(run=self.run_id)))
        model: tuple[Layout | None, Vector]
        absent = []
        try:
            model = self._model()
        except Error as error:
            model, absent = (None, np.zeros(0, dtype=np.float32)), [f"without its model: {error}"]
        took = run.ended.ToNanoseconds() - run.started.ToNanoseconds() if run.HasField("ended") else 0
        lasting = [alert for alert in run.alerts if not alert.HasField("ended")]
        told = (alert for alert in lasting if alert.kind != v1.AlertKind.ALERT_KIND_RUN_ENDED)
        return history_of(
            run,
            rounds,
            model,
            seconds=took / 1e9,
            warnings=(*(f"{alert.message}; {alert.remedy}" for alert in told), *absent),
            task=self._task,
        )

    def report(self) -> RunReport:
        """The report, as `fedpareto report` writes it."""
        with self._calls() as stub:
            return RunReport(page(ShownRun.read(stub, self.run_id)))

    def state_dict(self) -> "dict[str, torch.Tensor]":
        """The tensors of the newest model by name; see `History.state_dict`."""
        return tensors(*self._model())

    def module(self) -> "torch.nn.Module":
        """The task's model with the newest values; see `History.module`."""
        return self.history.module()

    def save(self, path: str | Path) -> None:
        """Writes the newest model to a safetensors file, as `fedpareto admin export` does.

        Raises:
            ArgumentError: the file exists.
            Error: it cannot be written, or the model did not arrive whole.
        """
        if Path(path).exists():
            raise ArgumentError(f"path: {path} exists: name another file, or delete it")
        with self._calls() as stub:
            save(stub.ExportModel(v1.ExportModelRequest(run=self.run_id)), Path(path))

    def stop(self, reason: str = "") -> None:
        """Ends the run for good, as `fedpareto admin stop`; its last model stays. A run that has ended stays as it is.

        Raises:
            Error: the administrator may not stop runs.
        """
        if self.state not in {name_of(v1.Run(state=state), "state") for state in ENDED}:
            with self._calls() as stub:
                self._run = stub.StopRun(v1.StopRunRequest(run=self.run_id, reason=reason)).run

    def pause(self) -> None:
        """Pauses the run. Raises Error: it has ended, or the administrator may not."""
        with self._calls() as stub:
            self._run = stub.PauseRun(v1.PauseRunRequest(run=self.run_id)).run

    def resume(self) -> None:
        """Lets a paused run go on. Raises Error: it has ended, or the administrator may not."""
        with self._calls() as stub:
            self._run = stub.ResumeRun(v1.ResumeRunRequest(run=self.run_id)).run

    def _model(self) -> tuple[Layout, Vector]:
        """The names and the values of the newest model."""
        with tempfile.TemporaryDirectory() as directory, self._calls() as stub:
            path = Path(directory, "model.safetensors")
            save(stub.ExportModel(v1.ExportModelRequest(run=self.run_id)), path)
            layout, vector = read_vector(path)
            return layout, np.array(vector)  # its file goes
