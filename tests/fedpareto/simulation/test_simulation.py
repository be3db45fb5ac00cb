"""Simulated clients: the same numbers as real ones, stacked or one by one; stopped and resumed; attacked."""

import json
import os
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import select

from coordinator.home import CoordinatorHome
from coordinator.services.checks.envelope_checks import EnvelopeChecks
from coordinator.services.views import overview
from federation.spec.run_spec import SpecError
from federation.spec.train_section import LocalSgd
from federation.tasks import task
from federation.v1.admin_pb2 import Reply
from federation.vectors import read_vector
from fedpareto.face.simulated import simulate
from fedpareto.processes.forked import completed
from fedpareto.simulation import SimulationError
from fedpareto.simulation.compiled import check_compiler, why_not_compiled
from fedpareto.simulation.simulate import Simulation
from fedpareto.simulation.simulation_progress import SimulationProgress
from storage.blobs import BlobStore
from storage.models import Round, Run
from storage.states import RunState
from tests.fedpareto.simulation import scene as simulations
from tests.fedpareto.simulation.scene import close, run_cli, spec
from tests.few import few, few_of
from tests.harness import federation

one_thread = simulations.one_thread  # a fixture


def test_a_simulation_is_the_real_federation_to_the_last_digits_of_float32(tmp_path: Path) -> None:
    text = spec(fraction=0.6, clients=3, rounds=3)
    names = [f"client-{number:03d}" for number in range(3)]
    with federation(tmp_path) as real:
        real.serve()
        for number, name in enumerate(names):
            real.join(name)
            real.work(name, "--task", "digits", "--set", f"part={number + 1}/3", "--set", "partition=shards:2")
        real.attending(*names)
        digest = real.wait_completed(real.submit("small", text.replace('name = "small"\n', "", 1)))
        selected = [json.loads(row[0]) for row in real.query("SELECT selected FROM rounds ORDER BY number")]
        losses = {
            (number, client): json.loads(told)["loss"]
            for number, client, told in real.query(
                "SELECT r.number, u.client_id, u.losses FROM replies u JOIN assignments USING (assignment_id) "
                "JOIN phases p USING (phase_id) JOIN rounds r USING (round_id) WHERE p.kind = 'train'"
            )
        }
        accuracy = [
            json.loads(row[0])["accuracy/mean"] for row in real.query("SELECT metrics FROM rounds ORDER BY number")
        ]
        kind, _, value = digest.partition(":")
        model = read_vector(real.home / "blobs" / kind / value[:2] / value[2:])[1]
    for backend in ("loop", "stacked"):
        history = simulate(text, backend=backend)
        close(history.model, model)
        asked = history.replies.groupby("round")["client"].apply(list).tolist()
        assert asked == selected
        for record in history.reply_records:
            assert record["loss"] == pytest.approx(losses[record["round"], record["client"]], rel=1e-4)
        assert history.rounds["accuracy/mean"].tolist() == pytest.approx(accuracy, abs=0.02)


@few("alie")
@pytest.mark.parametrize("attack", ["alie", "", "sign-flip", "label-flip", "free-rider", "scale=10,bias=5"])
@pytest.mark.full
def test_stacked_clients_do_what_single_ones_do(attack: str) -> None:
    text = spec(clients=6, attackers=2 if attack else 0, attack=attack, partition="iid", every=3)
    one, all_at_once = (simulate(text, backend=backend) for backend in ("loop", "stacked"))
    close(all_at_once.model, one.model)
    assert one.attackers == (("client-004", "client-005") if attack else ())
    assert [record["accepted"] for record in all_at_once.reply_records] == [True] * 18


@pytest.fixture
def compiler() -> None:
    """A C++ compiler, and what it needs of Python; skips where there is none."""
    try:
        check_compiler()
    except SimulationError as error:
        pytest.skip(str(error))


@pytest.mark.full
@pytest.mark.parametrize("backend", ["stacked", "compiled"])
def test_momentum_decay_and_proximity_come_to_what_a_loop_comes_to(
    request: pytest.FixtureRequest, backend: str
) -> None:
    if backend == "compiled":
        request.getfixturevalue("compiler")
    more = "momentum = 0.9\nweight_decay = 0.01\nproximal_mu = 0.1\n"
    text = spec(clients=3, partition="dirichlet:0.5", rounds=2).replace("[train]\n", f"[train]\n{more}")
    one, other = (simulate(text, backend=backend) for backend in ("loop", backend))
    close(other.model, one.model)
    assert other.rounds["accuracy/mean"].tolist() == pytest.approx(one.rounds["accuracy/mean"].tolist(), abs=0.02)


@pytest.mark.full
@pytest.mark.usefixtures("compiler")
def test_a_compiled_client_that_diverges_says_at_which_step() -> None:
    history = simulate(spec(rounds=1).replace("learning_rate = 0.1", "learning_rate = 1e30"), backend="compiled")
    told = [(record["accepted"], record["reason"]) for record in history.reply_records]
    assert told == [(False, "training-diverged")] * 4


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("digits", ""),
        ("fashion-mnist", "dropout would draw other numbers than a worker's"),
        ("mnist-fashion", "it has several objectives"),
        ("shakespeare", "recurrent layers cannot be compiled"),
    ],
)
def test_what_would_draw_other_numbers_is_not_compiled(name: str, why: str) -> None:
    assert why_not_compiled(task(name), LocalSgd(epochs=1, batch_size=10, learning_rate=0.1)) == why


@pytest.mark.full
def test_without_a_compiler_the_backend_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(spec())
    around = os.environ | {"CXX": "no-such-compiler"}
    done = completed(["-m", "fedpareto", "simulate", "run.toml", "--backend", "compiled"], cwd=tmp_path, env=around)
    assert done.returncode == 2
    assert "the backend compiled needs a C++ compiler that works (" in done.stderr.replace("\n", " ")
    assert done.stderr.strip().endswith("install one, or use --backend loop")


def test_a_model_without_a_finite_loss_improved_nobody() -> None:
    text = spec(rounds=1, algorithm="fedavg").replace("every = 1", 'every = 1\nsplits = ["train", "test"]')
    history = simulate(text + "\n[server]\nlearning_rate = 1e30\n")
    assert history.rounds["improved"].tolist() == [0.0]
    assert "loss/train" not in history.rounds


def test_a_rule_that_evaluates_another_model_than_it_trains_from_tells_nothing_of_improvement() -> None:
    text = spec(rounds=1, algorithm="afl").replace("every = 1", 'every = 1\nsplits = ["train", "test"]')
    history = simulate(text)
    assert "improved" not in history.rounds
    assert "improved" in simulate(text.replace('"afl"', '"fedavg"')).rounds


def test_refused_updates_are_recorded_as_the_coordinator_would(tmp_path: Path) -> None:
    history = simulate(spec(attackers=1, attack="nan", rounds=2))
    refused = [record for record in history.reply_records if not record["accepted"]]
    assert [(record["client"], record["reason"]) for record in refused] == [("client-003", "non-finite")] * 2
    assert history.state == "COMPLETED"


@pytest.mark.parametrize("backend", few_of(["loop", "stacked"], "loop"))
def test_a_round_may_ask_none_but_attackers_that_do_not_train(backend: str) -> None:
    history = simulate(spec(attackers=4, attack="free-rider", algorithm="fedavg"), backend=backend)
    assert history.state == "COMPLETED"


def test_a_simulation_that_was_stopped_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    text = spec(rounds=5).encode()
    whole = simulate(text)
    with Simulation(text, tmp_path / "home") as simulation:

        def stop(progress: SimulationProgress) -> None:
            if progress.done == 2:
                simulation.stop()

        half = simulation.run(stop)
    assert half.state == "PAUSED"
    assert len(half.round_records) >= 2
    with Simulation(text, tmp_path / "home", resume=True) as simulation:
        rest = simulation.run()
    assert (rest.state, len(rest.round_records)) == ("COMPLETED", 5)
    assert rest.model.tobytes() == whole.model.tobytes()
    with pytest.raises(SimulationError, match="another specification"):
        Simulation(spec(rounds=6).encode(), tmp_path / "home", resume=True)


@pytest.mark.full
def test_a_look_into_the_record_of_a_killed_simulation_changes_nothing_that_follows(tmp_path: Path) -> None:
    text, home = spec(rounds=4).encode(), tmp_path / "home"
    whole = simulate(text)
    with Simulation(text, home) as simulation:
        simulation.run(lambda progress: simulation.stop())
        with simulation._database.begin() as session:  # as kill -9 leaves it, in the middle of a round
            session.get_one(Run, simulation.run_id).state = RunState.RUNNING
    shown = run_cli("admin", "--home", str(home / "admin"), "round", simulation.run_id, "-1", "--json")
    assert shown.returncode == 0, shown.stderr
    seen = json.loads(shown.stdout)["run"]
    assert seen["state"] == "RUNNING", "a look changes nothing, not even the state of what was interrupted"
    rest = simulate(text, home=home, resume=True)
    assert rest.model.tobytes() == whole.model.tobytes()
    assert rest.replies.equals(whole.replies)


@pytest.mark.full
def test_a_simulation_that_a_second_interrupt_ends_at_once_is_paused_in_its_record(tmp_path: Path) -> None:
    def interrupt(progress: SimulationProgress) -> None:
        raise KeyboardInterrupt

    with Simulation(spec(rounds=3).encode(), tmp_path / "home") as simulation:
        with pytest.raises(KeyboardInterrupt):
            simulation.run(interrupt)
        with simulation._database.read() as session:
            run = session.get_one(Run, simulation.run_id)
    assert (run.state, run.reason) == (RunState.PAUSED, "interrupted; fedpareto simulate --resume goes on")
    assert simulate(spec(rounds=3), home=tmp_path / "home", resume=True).state == "COMPLETED"


@pytest.mark.full
def test_a_long_record_of_updates_is_read_a_piece_at_a_time(tmp_path: Path) -> None:
    with Simulation(spec(rounds=5, algorithm="fedavg").encode(), tmp_path / "home") as simulation:
        simulation.run()
        with simulation._database.read() as session:
            checks = EnvelopeChecks(simulation._home.federation_id, simulation._home.signing.chain)
            whole, _ = overview.replies(session, checks, simulation.run_id, None, "", 0, 1000)
            pieces: list[Reply] = []
            after = 0
            while (found := overview.replies(session, checks, simulation.run_id, None, "", after, 3))[0]:
                pieces.extend(found[0])
                after = found[1]
            own, _ = overview.replies(session, checks, simulation.run_id, 2, "client-001", 0, 3)
    assert [(update.round, update.client_id) for update in whole] == [
        (t, f"client-{i:03d}") for t in range(5) for i in range(4)
    ]
    assert pieces == whole
    assert [(update.round, update.client_id) for update in own] == [(2, "client-001")]


@pytest.mark.full
def test_models_of_past_rounds_do_not_pile_up(tmp_path: Path) -> None:
    with Simulation(spec(rounds=8, every=0).encode(), tmp_path / "home") as simulation:
        simulation.run()
    blobs = [path for path in (tmp_path / "home" / "blobs").glob("*/??/*") if path.stat().st_size > 10_000]
    assert len(blobs) <= 7  # before and after the first, the best and the last two rounds


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attack": "sign-flip"}, "both or neither"),
        ({"attackers": 9, "attack": "sign-flip"}, "9 attackers among 4"),
        ({"clients": 0}, "simulation.clients"),
    ],
)
def test_a_population_that_makes_no_sense_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        simulate(spec(**change))


def run_of(home: Path) -> tuple[Run, Round, BlobStore]:
    """The run of a home with its last round, and its models."""
    its = CoordinatorHome.load(home)
    with closing(its.open_database(durable=False)) as database, database.read() as session:
        last = session.scalars(select(Round).order_by(Round.number.desc()).limit(1)).one()
        return session.scalars(select(Run)).one(), last, its.open_blobs(database, durable=False)


def test_the_model_of_a_history_is_the_one_that_its_numbers_are_of(tmp_path: Path) -> None:
    history = simulate(spec(rounds=2, algorithm="afl"), home=tmp_path / "home")
    run, last, blobs = run_of(tmp_path / "home")
    assert last.deployed_model != run.model
    assert history.model.tolist() == read_vector(blobs.local(last.deployed_model or ""))[1].tolist()


def test_a_seed_of_the_model_changes_the_initial_model_alone(tmp_path: Path) -> None:
    first = {}
    for name, line in {"seed": "", "same": "model_seed = 5", "other": "model_seed = 6"}.items():
        simulate(spec(rounds=1, fraction=0.5) + line, home=tmp_path / name)
        run, last, _ = run_of(tmp_path / name)
        first[name] = run.initial_model, last.selected
    assert first["seed"] == first["same"]
    assert first["seed"][0] != first["other"][0]
    assert first["seed"][1] == first["other"][1]
    simulate(spec(rounds=1).replace("seed = 5", "seed = 6"), home=tmp_path / "six")
    assert run_of(tmp_path / "six")[0].initial_model == first["other"][0]
