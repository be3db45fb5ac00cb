"""Several objectives in the real federation: the same models as in simulation, and through kill -9.

Real processes: one coordinator, three workers that hold parts of `two-digits`, one of which serves one objective.
"""

import json
from collections.abc import Iterator

import pytest
import torch

from federation.tasks import initial_model, task
from federation.vectors import model_row, write_vectors
from fedpareto.face.simulated import simulate
from storage.blob_directory import DirectoryStore
from tests.fedpareto.simulation.scene import close
from tests.few import few
from tests.harness import Federation, federation

CLIENTS = ("client-000", "client-001", "client-002")
BOTH = ("left", "right")
SERVES = dict.fromkeys(CLIENTS, BOTH) | {"client-002": ("left",)}
SPEC = """
task = "two-digits"
rounds = 2
seed = 5
[algorithm]
{algorithm}
[train]
steps = 4
batch_size = 20
learning_rate = 0.1
deadline_seconds = 300
[selection]
minimum = 3
pool = "{pool}"
quorum = 1.0
[jacobian]
quorum = 1.0
[evaluate]
every = 0
splits = ["train", "test"]
[simulation]
clients = 3
partition = "dirichlet:2"
"""
# What the workers declare, a simulation reads in its specification.
SERVE = '[objectives.serve]\nclient-002 = ["left"]\n'
COUNT = 'name = "fedcmoo"\nbudget = 0.4'


class Scene:
    """A federation, and its workers."""

    def __init__(self, fed: Federation) -> None:
        self.fed = fed
        self.count = 0
        # Made once: making it costs the import of torch.
        self.model = fed.directory / "initial.safetensors"
        write_vectors(self.model, *initial_model(task("two-digits"), seed=5))
        self.blobs = DirectoryStore(fed.home / "blobs")

    def work(self, client: str, *, crash: str = "") -> None:
        part = CLIENTS.index(client)
        options = ["--task", "two-digits", "--set", f"part={part + 1}/3", "--set", "partition=dirichlet:2"]
        if SERVES[client] != BOTH:
            options += ["--set", f"objectives.two-digits={','.join(SERVES[client])}"]
        self.fed.work(client, *options, crash=crash)

    def submit(self, algorithm: str, *, pool: str = "enrolled", crash: bool = False) -> str:
        self.count += 1
        spec = SPEC.format(algorithm=algorithm, pool=pool)
        return self.fed.submit(f"objectives-{self.count}", spec, "--model", str(self.model), crash=crash)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    torch.set_num_threads(1)
    with federation(tmp_path_factory.mktemp("objectives")) as fed:
        fed.serve()
        scene = Scene(fed)
        for client in CLIENTS:
            fed.join(client)
            scene.work(client)
        yield scene


@pytest.fixture(scope="module")
def undisturbed(scene: Scene) -> tuple[str, str]:
    """The model that a run of FedCMOO comes to when nothing happens to it, and what it remembers."""
    return scene.fed.remembered(scene.submit(COUNT))


# --- what the simulation of the same specification computes

ALGORITHMS = {
    "count": COUNT,
    "svd": 'name = "fedcmoo"\nsketch = "svd"',
    "svd-two-way": 'name = "fedcmoo"\nsketch = "svd-two-way"\nbudget = 0.5',
    "top-k": 'name = "fedcmoo"\nsketch = "top-k"\nbudget = 0.3',
    "mask": 'name = "fedcmoo"\nsketch = "mask"\nbudget = 0.3',
    "gram": 'name = "fedcmoo"\nsketch = "gram"\nweights = "exact"',
    "exact": 'name = "fedcmoo"\nsketch = "exact"\nscope = "all"\nprior = "samples"',
    "analysed": 'name = "fedcmoo"\nunbiased = true\nweights = "pgd-raw"\nsteps = 1\nbeta = 0.1',
    "preference": 'name = "fedcmoo-pref"\npreference = [1, 3]',
    "fsmgda": 'name = "fsmgda"\nexact_stationarity = true',
    "scalarised": 'name = "scalarised"\nweights = [1, 2]',
}


@few("count")
@pytest.mark.parametrize("chosen", ALGORITHMS)
@pytest.mark.full
def test_a_simulation_over_objectives_is_the_real_federation(scene: Scene, chosen: str) -> None:
    run = scene.submit(ALGORITHMS[chosen])
    model, _ = scene.fed.remembered(run)
    text = SPEC.format(algorithm=ALGORITHMS[chosen], pool="enrolled") + SERVE
    history = simulate(f'name = "simulated"{text}', backend="loop", threads=1)
    close(history.model, model_row(scene.blobs.local(model)).read())
    rows = scene.fed.query("select metrics, objectives from rounds where run_id = :run order by number", run=run)
    for mine, (theirs, objectives) in zip(history.round_records, rows, strict=True):
        real = json.loads(theirs)
        kinds = ("weight/", "loss/", "objective/", "preference/", "bytes/up")
        names = {name for name in real if name.startswith(kinds)}
        assert {"bytes/up"} < names
        found, expected = ({name: one[name] for name in names} for one in (mine, real))
        assert found == pytest.approx(expected, rel=2e-3, abs=2e-3)
        assert json.loads(objectives)["clients"] == {"left": 3, "right": 2}


# --- what happens in the middle


@pytest.mark.full
@pytest.mark.parametrize("point", ["some-trained", "gradients-in", "aggregating"])
def test_a_coordinator_that_is_killed_between_the_phases_goes_on_to_the_same_bytes(
    scene: Scene, undisturbed: tuple[str, str], point: str
) -> None:
    scene.fed.serving.kill()
    crashing = scene.fed.serve(crash=point)
    run = scene.submit(COUNT, pool="attending", crash=True)
    crashing.wait_killed()
    scene.fed.serve()
    assert scene.fed.remembered(run) == undisturbed
    rows = scene.fed.query(
        "select a.client_id, r.number, p.number, a.state, count(u.reply_id) from assignments a "
        "join phases p on p.phase_id = a.phase_id join rounds r on r.round_id = p.round_id "
        "left join replies u on u.assignment_id = a.assignment_id and u.accepted "
        "where r.run_id = :run group by a.client_id, r.number, p.number, a.state",
        run=run,
    )
    assert len(rows) == 3 * (2 * 2 + 1), rows
    assert all(row[3] == "FULFILLED" and row[4] == 1 for row in rows), rows


@pytest.mark.full
def test_a_worker_that_dies_after_its_gradients_trains_from_the_same_ones(
    scene: Scene, undisturbed: tuple[str, str]
) -> None:
    victim = CLIENTS[0]
    scene.fed.workers[victim].kill()
    scene.work(victim, crash="after-receipt")
    crashing = scene.fed.workers[victim]
    run = scene.submit(COUNT)
    crashing.wait_killed()
    scene.work(victim)
    assert scene.fed.remembered(run) == undisturbed
