"""Plays schedules by their seeds, and checks each."""

import hashlib
import shutil
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from tests.simulated.checks import Result, problems, result
from tests.simulated.plans import Plan, plan_of
from tests.simulated.schedule import Schedule, Stage
from tests.simulated.world import Stuck


@dataclass(frozen=True)
class Outcome:
    """The outcome of a schedule.

    Attributes:
        seed: of the schedule.
        plan: the name of its plan.
        same: True if its result is that of the calm run.
        ended: the state of the run.
        counts: of what happened, by kind.
        problems: that the checks found.
        trace: what happened.
        seconds: of CPU time.
    """

    seed: int
    plan: str
    same: bool
    ended: str
    counts: dict[str, int]
    problems: list[str]
    trace: list[str]
    seconds: float

    @property
    def digest(self) -> str:
        """The digest of the trace."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()


class Runner:
    """Plays schedules in a directory, which should be in memory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stages: dict[str, tuple[Stage, Result]] = {}

    def run(self, seed: int, plan: Plan | None = None) -> Outcome:
        """Plays the schedule of a seed; without a `plan`, that of the seed."""
        plan = plan or plan_of(seed)
        stage, calm = self.stage(plan)
        began, directory = time.process_time(), self._directory / f"seed-{seed}"
        directory.mkdir()
        schedule, here = Schedule(stage, directory, seed), Result()
        try:
            schedule.play()
            found, here = problems(schedule, calm), result(schedule)
        except (Exception, Stuck) as error:
            found = [f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)[-4:])]
        finally:
            schedule.close()
            shutil.rmtree(directory)
        return Outcome(
            seed=seed,
            plan=plan.name,
            same=here.fits(calm),
            ended=str(here.state),
            counts=dict(schedule.world.counts),
            problems=found,
            trace=schedule.world.trace,
            seconds=time.process_time() - began,
        )

    def stage(self, plan: Plan) -> tuple[Stage, Result]:
        """The federation of a plan, and the result of its calm run; made at the first call."""
        if plan.name not in self._stages:
            stage, directory = Stage.of(plan, self._directory), self._directory / f"calm-{plan.name}"
            directory.mkdir()
            schedule = Schedule(stage, directory, 0, calm=True)
            schedule.play()
            calm = result(schedule)
            found = problems(schedule, calm)
            schedule.close()
            if found:
                raise AssertionError(f"without faults: {found}")
            self._stages[plan.name] = stage, calm
        return self._stages[plan.name]
