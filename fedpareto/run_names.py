"""Names of runs on a screen: where another run has the same name, with id and date."""

from collections.abc import Iterable

from federation.record.results import RUN_ENDED
from federation.v1.admin_pb2 import ListRunsRequest, Run
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import RunState
from fedpareto.formatting import when

EVALUATE = "evaluate"  # in place of the algorithm of a run that only measures models
STATISTICS = "statistics"  # the same of a run that describes data
ENDED = tuple(RunState.Value(f"RUN_STATE_{state}") for state in RUN_ENDED)


class RunNames:
    """The runs that a name could mean."""

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        self._runs = {run.run_id: run for run in runs}

    @classmethod
    def read(cls, stub: AdminStub) -> "RunNames":
        """Those of the newest runs of a federation, as many as one call lists."""
        return cls(stub.ListRuns(ListRunsRequest(brief=True)).runs)

    def origin(self, run_id: str, name: str) -> str:
        """The id of a run and when it was submitted, if another run has its name, too; otherwise empty."""
        if not any(run.name == name for other, run in self._runs.items() if other != run_id):
            return ""
        return ", ".join(filter(None, (run_id, self.submitted(run_id))))

    def submitted(self, run_id: str) -> str:
        """When a run was submitted, to the minute; empty if it is not known."""
        return when(self._runs[run_id], "created")[:16] if run_id in self._runs else ""

    def named(self, run_id: str, name: str) -> str:
        """The name of a run, with its `origin` if another run has this name, too."""
        origin = self.origin(run_id, name)
        return f"{name} ({origin})" if origin else name

    def argument(self, run: Run) -> str:
        """A run as an argument of a command: its name, or its id if the name could mean another run, or an option."""
        return run.run_id if run.name.startswith("-") or self.origin(run.run_id, run.name) else run.name

    def of_open(self, name: str) -> str:
        """The name of a run that has not ended, as `named`: only one such run has the name."""
        runs = (run for run in self._runs.values() if run.name == name and run.state not in ENDED)
        return next((self.named(run.run_id, name) for run in runs), name)
