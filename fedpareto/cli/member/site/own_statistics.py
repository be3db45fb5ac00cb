"""What this site would tell in a run that describes data: for its owner, before a decision."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from federation.plugins import PluginError
from federation.spec.run_spec import RunSpec
from federation.statistics.data_columns import ColumnError
from federation.statistics.shown import described
from federation.tasks import DataError, PartError, Splits, TaskError, task, task_code
from federation.text import counted, escaped
from federation.training.held_data import HeldSplits
from federation.training.trainers import TrainerChoice
from federation.work.statistics.work import Statistics
from fedpareto.cli.member.trainer_choices import trainers_of
from fedpareto.web.sections.described_data import HEADS, bars, cells
from worker.config import WorkerConfig
from worker.site.policy_file import Policy
from worker.site.run_requests import RunRequest


@dataclass(frozen=True)
class OwnStatistics:
    """The numbers that would leave.

    Attributes:
        problem: why none would; empty if they would.
        samples: of this site.
        private: True if they leave in a masked sum, and not in the clear.
        columns: as documents.
    """

    problem: str
    samples: int = 0
    private: bool = False
    columns: tuple[Mapping[str, Any], ...] = ()

    def lines(self) -> Iterator[str]:
        """The numbers for people."""
        if self.problem:
            yield escaped(f"no statistics would leave: {self.problem}")
            return
        how = "masked: only their sum over the members leaves" if self.private else "in the clear"
        yield f"would leave: these numbers of {counted(self.samples, 'sample')}, {how}"
        yield f"  {'; '.join(HEADS)}; histogram"
        for column in self.columns:
            yield escaped(f"  {'; '.join(cells(column))}; {bars(column)}")


def own_statistics(run: RunRequest, site: WorkerConfig, policy: Policy) -> OwnStatistics | None:
    """What this site would tell; None for a run that describes no data. It loads the site's data."""
    spec = run.describes
    if spec is None:
        return None
    private = spec.privacy.secure != "off"
    if private and run.task not in policy.summed_of([run.task]):
        return OwnStatistics("the data are under [privacy.NAME] in policy.toml; private statistics have no noise yet")
    if not private and run.task not in policy.statistics_of([run.task]):
        return OwnStatistics("policy.toml allows none in the open for this task (statistics.open)")
    try:
        return _told(run.task, spec, site, policy)
    except (TaskError, DataError, PartError, PluginError, ColumnError, OSError) as error:
        return OwnStatistics(str(error))
    except ModuleNotFoundError as error:
        return OwnStatistics(f"the data of {run.task} are read with {error.name}, which is not installed here")


def _told(name: str, spec: RunSpec, site: WorkerConfig, policy: Policy) -> OwnStatistics:
    loaded, work = task(name), Statistics.of(spec)
    kind = trainers_of(site).get(name, TrainerChoice()).kind(loaded)
    with task_code(name, "loading its data"):
        data = kind.load(loaded, site.source)
    if not isinstance(data, Splits):
        return OwnStatistics("another process has the data of this task")
    rules, private = policy.statistics.rules, spec.privacy.secure != "off"
    held = HeldSplits(loaded, data)
    samples, found = work.moved(held, rules) if private else work.counted(held, rules)
    if (problem := rules.problem(samples, work.bins)) is not None:
        return OwnStatistics(problem[1])
    columns = (
        described(sums, column, work.bins, fewest=0).document for sums, column in zip(found, work.columns, strict=True)
    )
    return OwnStatistics("", samples, private, tuple(columns))
