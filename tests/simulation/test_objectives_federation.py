"""Several objectives in the real federation: the same models as in simulation, through kill -9, and provable after.

Real processes: one coordinator, three workers that hold parts of `two-digits`, one of which serves one objective.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from numpy.typing import NDArray

from coordinator.aggregation.rules.find_weights import find_weights
from federation.digests import digest
from federation.sketches import sketch
from federation.sketches.base import ClientSketch, clip_to_psd
from federation.sketches.draws import shared_seed
from federation.spec.objective_names import encoder_columns, width
from federation.spec.run_spec import RunSpec
from federation.tasks import initial_model, task
from federation.trust.envelope import envelope_digest, unseal
from federation.trust.member_files import MemberFiles
from federation.v1 import admin_pb2 as admin
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import AssignmentManifest, ReplyManifest, SignedEnvelope, StepManifest
from federation.vectors import model_layout, model_row, to_bytes, update_rows
from fedpareto.notebook import simulate
from storage.blob_directory import DirectoryStore
from storage.records import canonical
from tests.harness import Federation, Process, federation
from tests.works import work_of

CLIENTS = ("client-000", "client-001", "client-002")
BOTH = ("left", "right")
Rows = dict[str, NDArray[np.float32]]
SERVES = dict.fromkeys(CLIENTS, BOTH) | {"client-002": ("left",)}
SPEC = """
name = "{name}"
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
        self.workers: dict[str, Process] = {}
        self.count = 0
        layout, vector = initial_model(task("two-digits"), seed=5)
        self.model = to_bytes(layout, vector)
        self.blobs = DirectoryStore(fed.home / "blobs")

    def work(self, client: str, *, crash: str = "") -> None:
        part = CLIENTS.index(client)
        options = ["--task", "two-digits", "--part", f"{part + 1}/3", "--partition", "dirichlet:2"]
        if SERVES[client] != BOTH:
            options += ["--objectives", f"two-digits={','.join(SERVES[client])}"]
        self.workers[client] = self.fed.work(client, *options, crash=crash)

    def submit(self, algorithm: str, *, pool: str = "enrolled") -> str:
        """Submits a run, whose coordinator may die before it has answered; returns its id."""
        self.count += 1
        name = f"objectives-{self.count}"
        header = admin.RunHeader(
            spec=SPEC.format(name=name, algorithm=algorithm, pool=pool).encode(),
            model=digest(self.model),
            model_bytes=len(self.model),
            objectives=BOTH,
        )
        requests = [admin.SubmitRunRequest(header=header), admin.SubmitRunRequest(chunk=self.model)]
        try:
            with self.fed.administrator() as channel:
                AdminStub(channel).SubmitRun(iter(requests), timeout=60, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
        return str(self.fed.query("select run_id from runs where name = :name", name=name)[0][0])

    def finished(self, run: str) -> tuple[str, str]:
        """The digest of the model of a run that completes, and what it remembers."""
        final = str(self.fed.wait_completed(run))
        return final, str(self.fed.query("select state_data from runs where run_id = :run", run=run)[0][0])

    def vector(self, name: str) -> NDArray[np.float32]:
        return model_row(self.blobs.local(name)).read()


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
def proven(scene: Scene) -> str:
    """A run of FedCMOO to which nothing happens."""
    run = scene.submit(COUNT)
    scene.finished(run)
    return run


@pytest.fixture(scope="module")
def undisturbed(scene: Scene, proven: str) -> tuple[str, str]:
    """The model that it comes to, and what it remembers."""
    return scene.finished(proven)


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


@pytest.mark.parametrize(
    "chosen",
    [name if name == "count" else pytest.param(name, marks=pytest.mark.full) for name in ALGORITHMS],
)
def test_a_simulation_over_objectives_is_the_real_federation(scene: Scene, chosen: str) -> None:
    run = scene.submit(ALGORITHMS[chosen])
    model, _ = scene.finished(run)
    text = SPEC.format(name="simulated", algorithm=ALGORITHMS[chosen], pool="enrolled") + SERVE
    history = simulate(text, backend="loop", threads=1)
    w = scene.vector(model)
    np.testing.assert_allclose(history.model, w, rtol=0, atol=2e-5 * float(np.abs(w).max()))
    rows = scene.fed.query("select metrics, objectives from rounds where run_id = :run order by number", run=run)
    for mine, (theirs, objectives) in zip(history.round_records, rows, strict=True):
        real = json.loads(theirs)
        names = {
            name for name in real if name.startswith(("weight/", "loss/", "objective/", "preference/", "bytes/up"))
        }
        assert {"bytes/up"} < names
        found, expected = ({name: one[name] for name in names} for one in (mine, real))
        assert found == pytest.approx(expected, rel=2e-3, abs=2e-3)
        assert json.loads(objectives)["clients"] == {"left": 3, "right": 2}


# --- what happens in the middle


@pytest.mark.full
@pytest.mark.parametrize(
    "point",
    ["some-trained", *(pytest.param(point, marks=pytest.mark.full) for point in ("gradients-in", "aggregating"))],
)
def test_a_coordinator_that_is_killed_between_the_phases_goes_on_to_the_same_bytes(
    scene: Scene, undisturbed: tuple[str, str], point: str
) -> None:
    assert scene.fed.coordinator is not None
    scene.fed.coordinator.kill()
    crashing = scene.fed.serve(crash=point)
    run = scene.submit(COUNT, pool="attending")
    crashing.wait_killed()
    scene.fed.serve()
    assert scene.finished(run) == undisturbed
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
    scene.workers[victim].kill()
    scene.work(victim, crash="after-receipt")
    crashing = scene.workers[victim]
    run = scene.submit(COUNT)
    crashing.wait_killed()
    scene.work(victim)
    assert scene.finished(run) == undisturbed


# --- what can be proven afterwards


class Record:
    """What a third party holds of a run: envelopes, blobs, public keys, and the specification that was submitted."""

    def __init__(self, scene: Scene, run: str) -> None:
        self.blobs = scene.blobs
        self.coordinator = MemberFiles.load(scene.fed.directory / CLIENTS[0]).coordinator.chain.present
        ((spec,),) = scene.fed.query("select spec from runs where run_id = :run", run=run)
        self.spec_digest, self.spec = digest(spec), RunSpec.parse(spec)
        self.keys = {
            name: Ed25519PublicKey.from_public_bytes(key)
            for name, key in scene.fed.query("select client_id, signing_key from clients")
        }
        query = "select step from rounds where run_id = :run order by number"
        self.steps = [self._opened(envelope, StepManifest) for (envelope,) in scene.fed.query(query, run=run)]
        self.orders: dict[str, AssignmentManifest] = {}
        self.replies: dict[str, ReplyManifest] = {}
        for order, reply, client in scene.fed.query(
            "select a.envelope, u.envelope, u.client_id from replies u join assignments a using (assignment_id)"
        ):
            sealed = SignedEnvelope.FromString(reply)
            manifest = unseal(sealed, ReplyManifest, self.keys[client])
            self.replies[envelope_digest(sealed)] = manifest
            self.orders[manifest.assignment_id] = self._opened(order, AssignmentManifest)

    def _opened(self, envelope: bytes, kind: type[Any]) -> Any:
        return unseal(SignedEnvelope.FromString(envelope), kind, self.coordinator)

    def rows(self, reply: ReplyManifest) -> Rows:
        """What a reply holds; its bytes have the digest that the client signed."""
        self.blobs.verify(reply.payload)
        return {name: row.read() for name, row in update_rows(self.blobs.local(reply.payload)).items()}


def weights_again(record: Record, step: StepManifest, before: Mapping[str, float]) -> dict[str, float]:
    """Lambda of a round of FedCMOO, from the sketches that the clients signed and the weights before."""
    told = [record.replies[name] for name in step.consulted]
    asked = [work_of(record.orders[reply.assignment_id]) for reply in told]
    serving = {name: sum(name in work.objectives for work in asked) for name in BOTH}
    layout = model_layout(record.blobs.local(step.base_model))
    made = sketch(asked[0].sketch, d=width(encoder_columns(layout)), objectives=BOTH, budget=asked[0].budget)
    parts = [
        ClientSketch(
            tuple(work.objectives),
            np.array([1.0 / serving[name] for name in work.objectives]),
            record.rows(reply),
        )
        for work, reply in zip(asked, told, strict=True)
    ]
    G = clip_to_psd(made.gram(parts, BOTH, shared_seed=shared_seed(record.spec.seed, step.round)))
    found = find_weights(G, np.array([before[name] for name in BOTH]))
    return dict(zip(BOTH, found.tolist(), strict=True))


def model_again(record: Record, step: StepManifest) -> NDArray[np.float32]:
    """The model after a step, from the one before it and the updates that the clients signed."""
    layout = model_layout(record.blobs.local(step.base_model))
    direction = np.zeros(layout.size)
    for name, coefficient in zip(step.replies, step.coefficients, strict=True):
        direction += coefficient * record.rows(record.replies[name])["loss"].astype(np.float64)
    base = model_row(record.blobs.local(step.base_model)).read().astype(np.float64)
    return (base - step.rate * direction).astype(np.float32)


def test_a_round_can_be_recomputed_and_proven_from_what_was_signed(scene: Scene, proven: str) -> None:
    run, record = proven, Record(scene, proven)
    model, _ = scene.finished(run)
    weights = dict.fromkeys(BOTH, 0.5)
    state: dict[str, Any] = {}
    base = digest(scene.model)
    for number, step in enumerate(record.steps):
        assert (step.run_id, step.round, step.base_model) == (run, number, base)
        assert step.state_before == digest(canonical(state).encode())
        consulted, updates = ([record.replies[name] for name in names] for names in (step.consulted, step.replies))
        for reply in (*consulted, *updates):  # each is of this round, and of this specification
            assert (reply.run_id, reply.round, reply.base_model) == (run, number, base)
            assert reply.spec == record.spec_digest
        assert [reply.client_id for reply in consulted] == [reply.client_id for reply in updates] == list(CLIENTS)

        weights = weights_again(record, step, weights)
        assert {item.objective: item.weight for item in step.weights} == pytest.approx(weights, rel=1e-12)
        for reply in updates:  # and everybody was asked to train on these weights, from these gradients
            work = work_of(record.orders[reply.assignment_id])
            wanted = {name: weights[name] * 3 / (3 if name == "left" else 2) for name in SERVES[reply.client_id]}
            assert {item.objective: item.weight for item in work.targets[0].weights} == pytest.approx(wanted)
            assert work.from_jacobian
        assert list(step.coefficients) == pytest.approx([1 / 3] * 3)
        record.blobs.verify(step.result_model)
        made = model_row(record.blobs.local(step.result_model)).read()
        # The last digit depends on the order in which this processor's BLAS adds.
        np.testing.assert_array_max_ulp(model_again(record, step), made, maxulp=1)
        weights = {item.objective: item.weight for item in step.weights}
        state = {"rule": {"weights": weights}, "vectors": {}, "blobs": []}
        assert step.state_after == digest(canonical(state).encode())
        base = step.result_model
    assert base == model


def test_other_sketches_would_have_given_other_weights(scene: Scene, proven: str) -> None:
    """What is proven depends on what was signed: a record whose sketches differ does not lead to the same lambda."""

    class Altered(Record):
        def rows(self, reply: ReplyManifest) -> Rows:
            scale = np.float32(3 if reply.client_id == CLIENTS[1] else 1)
            return {name: scale * row for name, row in super().rows(reply).items()}

    record = Altered(scene, proven)
    signed = {item.objective: item.weight for item in record.steps[0].weights}
    assert weights_again(record, record.steps[0], dict.fromkeys(BOTH, 0.5)) != pytest.approx(signed, rel=1e-6)
    made = model_row(record.blobs.local(record.steps[0].result_model)).read()
    assert not np.allclose(model_again(record, record.steps[0]), made, rtol=1e-3)
