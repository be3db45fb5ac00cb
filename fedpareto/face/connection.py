"""`fedpareto.connect`: a federation as its administrator sees it, by the calls that the commands make."""

import os
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.timestamp_pb2 import Timestamp

from federation import tasks
from federation.errors import ArgumentError
from federation.spec.run_spec import RunSpec
from federation.v1 import admin_pb2 as v1
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.admin_messages import name_of, whole
from fedpareto.cli.admin import client, upload
from fedpareto.face.federated_run import FederatedRun
from fedpareto.face.given_spec import Spec, check_task, document, paths_of, task_name
from fedpareto.face.quiet import without_log_lines
from fedpareto.missing_packages import need

if TYPE_CHECKING:
    import pandas as pd

    from federation.tasks import Task


def connect(
    home: str | Path, *, passphrase_file: str | Path | None = None, proxy: str | None = None
) -> "FederationCalls":
    """A federation, as the administrator whose directory is given; it logs in when a call needs it.

    While a coordinator on this machine does not run, calls that only show the record read it from its directory.

    Args:
        home: the administrator's directory, or a coordinator's, which holds it; as --home of `fedpareto admin`.
        passphrase_file: its first line is the passphrase of the signing key.
        proxy: the address of an HTTP proxy, or "none"; None takes the environment's.

    Raises:
        Error: the directory is no administrator's, or the coordinator cannot be reached or refuses.
    """
    federation = FederationCalls(
        Path(home), passphrase_file=None if passphrase_file is None else Path(passphrase_file), proxy=proxy
    )
    federation.check()
    return federation


class FederationCalls:
    """A federation; `fedpareto.connect` and `fedpareto.local` return one. Each call has a connection of its own.

    Attributes:
        home: the administrator's directory.
    """

    def __init__(
        self,
        home: Path,
        *,
        passphrase_file: Path | None = None,
        proxy: str | None = None,
        task: "tuple[str, type[Task] | None]" = ("", None),
    ) -> None:
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # its core tells standard error of every failed handshake
        without_log_lines()
        self.home = client.find_home(home)
        self._passphrase_file, self._proxy = passphrase_file, proxy
        self._task_name, self._task = task  # of every run; a name that is empty if the specification has it

    def __repr__(self) -> str:
        """The directory of the administrator."""
        return f"<federation of {self.home}>"

    def check(self) -> None:
        """Makes a small call. Raises Error: the coordinator cannot be reached, or refuses."""
        with self._calls() as stub:
            stub.ListRuns(v1.ListRunsRequest(page_size=1, brief=True))

    def members(self) -> "pd.DataFrame":
        """One row for each member: member, state, attending, paused, last_seen, certificate_ends, and its tasks."""
        need("tables need", "pandas", extra="experiments")
        import pandas as pd  # noqa: PLC0415 - an extra

        with self._calls() as stub:
            clients = whole(stub.ListClients, v1.ListClientsRequest()).clients
        return pd.DataFrame.from_records(
            [
                {
                    "member": member.client_id,
                    "state": name_of(member, "state"),
                    "attending": member.attending,
                    "paused": member.paused,
                    "last_seen": _time(member.last_seen),
                    "certificate_ends": _time(member.certificate_expires),
                    "tasks": [summary.task for summary in member.tasks],
                }
                for member in clients
            ]
        )

    def runs(self) -> list[FederatedRun]:
        """The runs, the newest first."""
        with self._calls() as stub:
            runs = whole(stub.ListRuns, v1.ListRunsRequest(brief=True)).runs
        return [FederatedRun(self._calls, run, task=self._task) for run in runs]

    def run(self, name: str) -> FederatedRun:
        """The run of this name or id. Raises Error: there is none, or several."""
        with self._calls() as stub:
            run = stub.GetRun(v1.GetRunRequest(run=name, brief=True, choice=v1.RUN_CHOICE_ONLY)).run
        return FederatedRun(self._calls, run, task=self._task)

    def submit(
        self,
        spec: Spec,
        *,
        task: "type[Task] | None" = None,
        model: str | Path | Sequence[str | Path] | None = None,
        model_of: str = "",
        best: str = "",
        statistics: str = "",
        paused: bool = False,
    ) -> FederatedRun:
        """Submits a run, as `fedpareto admin submit`.

        Args:
            spec: the run specification, as `fedpareto.simulate` takes it.
            task: the class that makes the initial model. Its code is never sent: members take part with the task that
                they have under the name in the specification. Without that name, it is the class's, `module:Class`.
            model: a safetensors file with the initial model; of a run that evaluates, a file or several, to measure.
            model_of: the name or id of a run: a run that evaluates measures its newest model.
            best: a metric: with `model_of`, its best model by the mean on the validation split.
            statistics: the name or id of a run that has described the members' data: its result fills the layer
                `Standardise` of the task's model.
            paused: True lets the run wait for `resume`.

        Raises:
            SpecError, TaskError: the specification or the task cannot be used here.
            ArgumentError: the specification names no task, and members cannot know a class of a notebook's cell.
            Error: the coordinator refuses the run.
        """
        kind = self._task if task is None else check_task(task)
        text = document(spec, self._task_name)
        if task is not None and not self._task_name:
            text = _with_task(spec, text, task)
        parsed = upload.checked_spec(text)
        own = None if kind is None else tasks.task_of(kind, parsed.task)
        with self._calls() as stub:
            described = b""
            if statistics:
                text, described = upload.scaled_by(stub, text, statistics, own)
                parsed = upload.checked_spec(text)
            text, models = upload.given_models(text, parsed, paths_of(model), model_of, best, own, described)
            if model_of:
                text, models = upload.model_of_run(stub, text, model_of, best)
            response = upload.submit(stub, text, models, paused=paused)
        remarks = (*(remark for given in models for remark in given.remarks), *response.warnings)
        return FederatedRun(self._calls, response.run, task=kind, warnings=remarks)

    @contextmanager
    def _calls(self) -> Iterator[AdminStub]:
        with client.connect(
            self.home,
            passphrase_file=self._passphrase_file,
            proxy=self._proxy,
            warn=lambda text: warnings.warn(text, stacklevel=2),
        ) as stub:
            yield stub


def _with_task(spec: Spec, text: bytes, task: "type[Task]") -> bytes:
    """A specification with the task's name, if it has none."""
    try:
        named = "task" in tomllib.loads(text.decode())
    except ValueError:
        return text  # the check of the specification says what is wrong
    if named or isinstance(spec, RunSpec):
        return text
    if task.__module__ == "__main__":
        raise ArgumentError(
            f"spec: it names no task. Code is never sent, so members cannot know {task.__qualname__} of this notebook "
            'or script: add task = "..." with the name under which they have it; members() shows their tasks'
        )
    return document(spec, task_name(task))


def _time(moment: Timestamp) -> "pd.Timestamp | None":
    """A time for a table; None if it was not told."""
    import pandas as pd  # noqa: PLC0415 - an extra

    return pd.Timestamp(moment.ToNanoseconds(), tz="UTC") if moment.ToNanoseconds() else None
