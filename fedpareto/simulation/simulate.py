"""A whole simulation: a coordinator's home, a conductor, and clients in this process."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from coordinator.alerts.recording import record_run
from coordinator.clock import utc_now
from coordinator.home import CoordinatorHome
from coordinator.rounds.conductor import Conductor
from coordinator.rounds.fleets.base import Held, RunContext, RunFacts
from coordinator.rounds.runs.disclosure import undisclosed
from coordinator.rounds.runs.specification import (
    cautions,
    fitting_metrics,
    fitting_objectives,
    needed_abilities,
    parse_run,
)
from coordinator.rounds.runs.submission import new_run
from coordinator.rounds.transitions import INTERRUPTED, ROUND_ENDED, RUN_ENDED, SIMULATOR, move_run
from coordinator.services.views import overview
from coordinator.services.views.summaries import rounds_from, summaries
from coordinator.settings import SETTINGS_FILE, Settings
from federation.attacks.probe import Probe
from federation.digests import digest
from federation.owners_code import without_exit
from federation.process.shared_state import ordinary, ordinary_numpy
from federation.spec.client_sections import SelectionSpec
from federation.spec.computation import CANNOT, with_fixed
from federation.spec.run_spec import RunSpec, with_columns, with_models
from federation.tasks import (
    Dataset,
    DataSource,
    Task,
    buffers_of,
    cautions_of,
    columns_of,
    initial_model,
    metrics_of,
    scale_layer_of,
    task,
)
from federation.training.determinism import pick_device
from federation.training.given_model import given_model
from federation.training.own import assumed_parameters, run_model, scaled_spec
from federation.training.torch_trainer import TorchTrainer
from federation.training.trainer import Trainer
from federation.training.trainers import trainer_kind
from federation.v1.admin_pb2 import RoundSummary
from federation.v1.admin_pb2 import Run as RunMessage
from federation.vectors import to_bytes
from fedpareto.simulation import SimulationError
from fedpareto.simulation.backends import Backend, pick_backend
from fedpareto.simulation.fleet import SimulatedFleet, enroll, forget_interrupted
from fedpareto.simulation.history import History, read_history
from fedpareto.simulation.local_state import PopulationState
from fedpareto.simulation.population import Population, populate, try_smallest
from fedpareto.simulation.simulation_progress import SimulationProgress
from storage import models
from storage.models import Round, Run
from storage.retention import collect
from storage.states import RoundState, RunState

_FEDERATION = "simulation"  # the federation id in its home
_KEEP_ROUNDS = 2  # the last rounds that keep their models, beside the first and the best one
_COLLECT_EVERY = 20  # rounds


class Simulation(AbstractContextManager["Simulation"]):
    """One run on simulated clients. The arguments are those of `fedpareto.simulate`; `spec` is a TOML document.

    Attributes:
        spec: the specification, parsed.
        backend: trains the clients.
        cautions: warnings for the author of the specification.
        remarks: what was converted, added or left out of the file of the initial model.

    Raises:
        SpecError, TaskError, DataError, PartError, AttackError, PluginError: the specification cannot be used.
        SimulationError: nothing to resume, another content of `home`, no Ray for the backend "ray", or a specification
            that names clients that do not exist.
        CoordinatorHomeError, IdentityError, OSError: `home` is damaged, or cannot be made.
        GivenModelError: the file of a model cannot be used.
        ScaleError: the model cannot be filled from `statistics`, the document of a result.
        ValueError: no such device or backend.
        DatabaseBusy: another process uses the home.
    """

    @without_exit(SimulationError)
    @ordinary()
    def __init__(
        self,
        spec: bytes,
        home: Path,
        *,
        data: Path | None = None,
        members: Mapping[str, Path] | None = None,
        download: bool = False,
        device: str = "auto",
        backend: str = "auto",
        ray_address: str | None = None,
        threads: int | None = None,
        resume: bool = False,
        trainer: str = "",
        given: Sequence[Path] = (),
        statistics: bytes = b"",
    ) -> None:
        self.spec, self._algorithm = parse_run(spec)
        if len(given) > 1 and not self.spec.measures:
            raise SimulationError('a run that trains begins with one model; several are for kind = "evaluate"')
        if self.spec.measures and not given:
            raise SimulationError('kind = "evaluate": give the models to measure, each a safetensors file')
        existing = _existing(home, resume)  # first, as all checks that need no data, which may take a while
        picked_device = pick_device(device)
        self._threads = threads
        self._task = known_task = task(self.spec.task)
        if statistics:
            result = self.spec.parameters.statistics or digest(statistics)
            spec = scaled_spec(spec, known_task, result, statistics)
            self.spec = RunSpec.parse(spec)
        elif self.spec.parameters.statistics:
            raise SimulationError("parameters.statistics names a result: give its document, too (--statistics FILE)")
        self._trainer = trainer_kind(known_task, trainer)
        self._objectives = fitting_objectives(self.spec, self._algorithm, known_task.objectives)
        self._metrics = fitting_metrics(self.spec, metrics_of(known_task))
        needed = needed_abilities(self.spec, self._algorithm, self._objectives)
        if missing := sorted(needed - with_fixed(self._trainer.abilities)):
            raise SimulationError(f"the run cannot be simulated: {self._trainer.__name__} {CANNOT[missing[0]]}")
        self.remarks: tuple[str, ...] = ()
        seed = self.spec.seed_of_model
        if self.spec.describes:
            self._models = [initial_model(known_task, seed)]
        elif not (self.spec.measures or given):
            self._models = [run_model(known_task, seed, self.spec.parameters, statistics)]
        else:
            if self.spec.measures and self.spec.parameters.shares_all:  # a file holds everything, as `submit` takes it
                assumed = assumed_parameters(buffers_of(known_task), scale_layer_of(known_task))
                self.spec = self.spec.model_copy(update={"parameters": assumed})
            read = [given_model(path, known_task, seed, self.spec.parameters, statistics) for path in given]
            self._models = [(model.layout, model.vector) for model in read]
            self.remarks = tuple(dict.fromkeys(remark for model in read for remark in model.remarks))
        if self.spec.describes:
            spec = with_columns(spec, columns_of(known_task))
            self.spec = RunSpec.parse(spec)
        if self.spec.measures:
            spec = with_models(spec, [digest(to_bytes(*one)) for one in self._models], self.spec)
            self.spec = RunSpec.parse(spec)
        self.cautions = cautions(self.spec, self._algorithm) + cautions_of(known_task, self.spec)
        self._population = populate(
            known_task, self.spec, DataSource(data, download=download), self._trainer, picked_device, members
        )
        _check_clients(self.spec.selection, self._population.samples)
        self._stopping = False
        with ExitStack() as stack:
            self.backend: Backend = pick_backend(
                backend,
                known_task,
                self._population,
                self.spec,
                self._trainer,
                device=picked_device,
                ray_address=ray_address,
            )
            stack.callback(self.backend.close)
            if self._trainer is TorchTrainer and not self.spec.describes:
                try_smallest(known_task, self.spec, self._population, picked_device)
            self._probe = _probe(known_task, self._trainer, self._population, picked_device)
            settings = Settings(federation_id=_FEDERATION, keep_rounds=_KEEP_ROUNDS)
            self._home = existing or CoordinatorHome.init(home, settings, now=utc_now())
            self._database = self._home.open_database(durable=False)
            stack.callback(self._database.close)
            self._database.lock_exclusive()
            self._blobs = self._home.open_blobs(self._database, durable=False)
            self._context = RunContext(
                database=self._database,
                blobs=self._blobs,
                signing=self._home.signing,
                device="cpu",
                clock=utc_now,
                wait=self._wait,
                changed=lambda: None,
            )
            self.run_id = self._resumed(spec, given) or self._submitted(spec)
            self._open = stack.pop_all()

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def attackers(self) -> tuple[str, ...]:
        """The clients that attack."""
        return tuple(self._population.attackers)

    @property
    def clients(self) -> tuple[str, ...]:
        """The names of the clients, in order."""
        return tuple(self._population.splits)

    @property
    def done(self) -> int:
        """The number of rounds that are over."""
        return self._last_round()[0]

    def ended_rounds(self, start: int = 0) -> tuple[RunMessage, list[RoundSummary]]:
        """The run, and its rounds from `start` on that have ended, as the Admin service tells of them."""
        with self._database.read() as session:
            rounds = rounds_from(session, self.run_id, start)
            ended = [item for item in rounds if item.state in ROUND_ENDED]
            return overview.run(session, session.get_one(Run, self.run_id)), summaries(session, ended)

    def stop(self) -> None:
        """Ends `run` soon, from any thread or signal handler. Finished rounds are kept, and the run can be resumed."""
        self._stopping = True

    @without_exit(SimulationError)
    def run(self, progress: Callable[[SimulationProgress], object] = lambda progress: None) -> History:
        """Runs to the end, or until `stop`; calls `progress` after every round."""
        facts = RunFacts.load(self._database, self.run_id)
        began, first = time.perf_counter(), self.done

        last = first

        def changed() -> None:
            nonlocal last
            done, round_ = self._last_round()
            if done == last:
                return
            last, metrics = done, {} if round_ is None else round_.metrics
            rate = (done - first) / (time.perf_counter() - began)
            stepped = round_ is not None and round_.result_model is not None
            hidden = undisclosed(self.spec, metrics, stepped=stepped, conceals=False)
            progress(SimulationProgress(done, self.spec.rounds, metrics, rate, hidden))
            if done % _COLLECT_EVERY == 0:
                self._collect()

        context = replace(self._context, changed=changed)
        with ordinary():
            local_state = PopulationState(self._home.directory / "kept", self._task, self.spec)
        fleet = SimulatedFleet(
            facts,
            context,
            algorithm=self._algorithm,
            population=self._population,
            local=self.backend.local,
            probe=self._probe,
            local_state=local_state,
            ordinary=partial(ordinary, self._threads),
            stopped=lambda: self._stopping,
        )
        try:
            with ordinary_numpy():
                Conductor(fleet).conduct()
        except Held:
            self._pause()
        except BaseException:
            with suppress(SQLAlchemyError):  # then the next process that reads the record pauses the run
                self._pause()
            raise
        self._collect()
        record_run(self._database, self.run_id, None, utc_now())
        with self._database.read() as session:
            run = session.get_one(Run, self.run_id)
            history = read_history(
                session,
                self._blobs,
                run,
                attackers=self.attackers,
                seconds=time.perf_counter() - began,
                notes=tuple(fleet.left_out.values()),
            )
        return replace(history, warnings=(*self.remarks, *history.warnings))

    def _wait(self, seconds: float | None, replies: int = 1) -> None:
        if self._stopping:
            raise Held

    def _last_round(self) -> tuple[int, Round | None]:
        with self._database.read() as session:
            last = session.scalar(
                select(Round)
                .where(Round.run_id == self.run_id, Round.state.in_([RoundState.COMPLETED, RoundState.SKIPPED]))
                .order_by(Round.number.desc())
                .limit(1)
            )
        return (0, None) if last is None else (last.number + 1, last)

    def _submitted(self, document: bytes) -> str:
        now, digests = utc_now(), []
        run_id = digest(document).partition(":")[2][:12]  # the same each time: private rounds depend on it
        with self._database.begin() as session:
            for layout, vector in self._models:
                content = to_bytes(layout, vector)
                digests.append(self._blobs.put(content))
                models.note_model(session, digests[-1], size=len(content), parameters=layout.size, created=now)
            enroll(session, self._population, self.spec.task, self._context)
            facts = document, self.spec, self._objectives, self._metrics
            session.add(new_run(*facts, run_id=run_id, model=digests[0], by=SIMULATOR, created=now))
        return run_id

    def _resumed(self, document: bytes, given: Sequence[Path]) -> str | None:
        """The run in the home; None if there is none yet, as after an early interruption.

        A given model must be the one with which it began.
        """
        with self._database.begin() as session:
            run = session.scalar(select(Run).order_by(Run.created.desc()).limit(1))
            if run is None:
                return None
            if run.spec_digest != digest(document):
                raise SimulationError(
                    f"{self._home.directory} holds a simulation of another specification ({run.name}): "
                    "resume it with its own, or simulate this one in another directory"
                )
            if given and run.initial_model != digest(to_bytes(*self._models[0])):
                raise SimulationError(
                    f"{self._home.directory} holds a simulation that began with another model than {given[0]}: resume "
                    "it without a model, or simulate in another directory"
                )
            if run.state not in RUN_ENDED:
                forget_interrupted(session, run.run_id)
            if run.state is RunState.PAUSED:
                move_run(run, RunState.RUNNING, utc_now())
            return run.run_id

    def _pause(self) -> None:
        with self._database.begin() as session:
            run = session.get_one(Run, self.run_id)
            if run.state is RunState.RUNNING:
                move_run(run, RunState.PAUSED, utc_now(), INTERRUPTED)

    def _collect(self) -> None:
        later = utc_now() + timedelta(seconds=1)  # no other process writes here: no blob is too young
        collect(self._database, self._blobs, now=later, grace_seconds=0, keep_rounds=_KEEP_ROUNDS)


def _probe(known_task: Task, trainer: type[Trainer], population: Population, device: str) -> Probe | None:
    """Measures a backdoor's success, on the honest clients' test samples; None without a backdoor."""
    attack = next(iter(population.attackers.values()), None)
    honest = [own for name, own in population.splits.items() if name not in population.attackers]
    if attack is None or not honest or trainer is not TorchTrainer:
        return None
    clean = Dataset(torch.cat([own.test.x for own in honest]), torch.cat([own.test.y for own in honest]))
    return None if attack.triggered(clean) is None else Probe(attack, trainer(known_task, honest[0], device), clean)


def _check_clients(selection: SelectionSpec, samples: Mapping[str, int]) -> None:
    """Checks that a selection suits these clients, whose numbers of training samples are given by name.

    Raises:
        SimulationError: it does not; the message names the key.
    """
    clients = f"the {len(samples)} clients are {min(samples)} to {max(samples)}"
    if selection.tags:
        raise SimulationError("selection.tags: simulated clients have no tags; name them in selection.members")
    if problem := selection.unknown(samples):
        raise SimulationError(f"{problem}; {clients}")
    if empty := [name for name in selection.required if not samples[name]]:
        raise SimulationError(f"selection.required: {empty[0]} has no training samples")
    ready = sum(count > 0 and selection.admits(name) for name, count in samples.items())
    if ready < selection.minimum:
        raise SimulationError(
            f"{ready} clients with data, but a round needs {selection.minimum}: see selection.minimum"
        )
    if absent := sorted(set(selection.always) - samples.keys()):
        raise SimulationError(f"selection.always: no client {absent[0]!r}; {clients}")


def _existing(directory: Path, resume: bool) -> CoordinatorHome | None:
    """The home of the simulation that is resumed; None for a new one."""
    exists = (directory / SETTINGS_FILE).exists()
    if not resume and exists:
        raise SimulationError(
            f"{directory} is taken: go on with the simulation there (--resume), or name another directory (--home)"
        )
    if not resume:
        if directory.is_dir() and any(directory.iterdir()) and not (directory / "ca.key").exists():
            raise SimulationError(f"{directory} holds other things: name a new directory (--home)")
        return None
    if not exists:
        raise SimulationError(f"{directory} holds no simulation to resume (no {SETTINGS_FILE})")
    home = CoordinatorHome.load(directory)
    if home.federation_id != _FEDERATION:
        raise SimulationError(f"{directory} is the home of the federation {home.federation_id}, not of a simulation")
    return home
