"""Updates in bfloat16: half the bytes, and nothing is lost over the rounds."""

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.rounds.runs.specification import parse_run
from federation.aggregation.gram import combine, gram
from federation.monitoring.events import Events
from federation.spec.objective_names import joint_target
from federation.spec.run_spec import SpecError
from federation.spec.train_section import LocalSgd
from federation.tasks import initial_model, task
from federation.trust.envelope import sign
from federation.v1.common_pb2 import AssignmentManifest, ReplyManifest, SignedEnvelope, StepManifest, TrainWork
from federation.vectors import narrow, payload_bytes, read_vector, update_layout, update_rows, widen
from federation.work.base import Result, RowSchema, Shape, WorkError, WorkingClient
from federation.work.registry import decode, encode
from federation.work.train.work import Train
from fedpareto.face.simulated import simulate
from fedpareto.simulation.simulate import Simulation
from fedpareto.simulation.simulation_progress import SimulationProgress
from tests.harness import federation
from tests.running import refused
from tests.stage import LAYOUT, Stage, spec
from worker.home import WorkerHome
from worker.work.local_state import LocalState, kept_state
from worker.work.spool import Spool

SHAPE = Shape(update_layout([("w", 1000)]), ("loss",), ("loss",))
TRAIN = Train(sgd=LocalSgd(steps=1, batch_size=0, learning_rate=0.1), targets=joint_target(("loss",)), dtype="BF16")


def client(residual: np.ndarray | None = None) -> WorkingClient:
    given: Any = dict.fromkeys(("client_id", "round", "attempt", "memory", "origin", "site"))
    return WorkingClient(**given, shape=SHAPE, residual=residual)


def answered(row: np.ndarray, residual: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """What is sent of a row, and what its rounding leaves."""
    result = TRAIN.answer(client(residual), Result({"loss": row}, {}, {}, 1))
    assert result.residual is not None
    return widen(result.rows["loss"]), result.residual


# ---- rounding


def test_numbers_are_rounded_as_pytorch_does_and_the_rest_is_exact() -> None:
    draw = np.random.default_rng(0)
    values = (draw.standard_normal(10_000) * 10.0 ** draw.integers(-38, 38, 10_000)).astype(np.float32)
    values[:4] = 0.0, -0.0, 1e-45, 3.3e38
    raw, left = narrow(values)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(raw, expected)
    np.testing.assert_array_equal(widen(raw).astype(np.float64) + left, values.astype(np.float64))


def test_what_rounding_leaves_is_sent_in_later_rounds() -> None:
    draw = np.random.default_rng(1)
    rows = (draw.standard_normal((200, 1000)) * 1e-3 + 1.003).astype(np.float32)  # bfloat16 has steps of 1/128 here
    total, residual = np.zeros(1000), None
    for row in rows:
        sent, residual = answered(row, residual)
        total += sent
    exact = rows.sum(axis=0, dtype=np.float64)
    assert residual is not None
    np.testing.assert_allclose(total + residual, exact, atol=1e-4)
    assert np.abs(total - exact).max() < 0.01
    forgotten = sum(answered(row)[0].astype(np.float64) for row in rows)
    assert np.abs(forgotten - exact).max() > 0.1


def test_an_update_beyond_the_range_of_bfloat16_is_no_update() -> None:
    row = np.full(1000, 3.4e38, dtype=np.float32)
    with pytest.raises(WorkError, match="row 'loss': a number leaves the range of bfloat16") as caught:
        answered(row)
    assert caught.value.reason == "training-diverged"


def test_the_work_names_its_type_and_every_row_has_a_residual_of_its_own() -> None:
    message = encode(TRAIN)
    assert decode("train", message, SHAPE) == TRAIN
    assert TRAIN.rows(SHAPE) == (RowSchema("loss", 1000, "BF16"),)
    assert TRAIN.residuals(SHAPE) == (RowSchema("residual/loss", 1000),)
    assert replace(TRAIN, dtype="F32").residuals(SHAPE) == ()
    with pytest.raises(WorkError, match="rows of 'U32'; an update is of BF16 or F32"):
        decode("train", TrainWork(steps=1, learning_rate=0.1, dtype="U32").SerializeToString(), SHAPE)
    both = replace(TRAIN, targets={"a": {"a": 1.0}, "b": {"b": 1.0}})
    shape = replace(SHAPE, objectives=("a", "b"), serves=("a", "b"))
    left = np.append(np.full(1000, 0.25), np.full(1000, 0.5)).astype(np.float32)
    rows = {"a": np.ones(1000, np.float32), "b": np.zeros(1000, np.float32)}
    found = both.answer(replace(client(left), shape=shape), Result(rows, {}, {}, 1))
    assert [set(widen(found.rows[name])) for name in ("a", "b")] == [{1.25}, {0.5}]


# ---- aggregation


def test_gram_and_combine_hold_no_row_in_memory_and_give_the_bytes_of_the_widened_ones(tmp_path: Path) -> None:
    length, draw = 1 << 21, np.random.default_rng(2)
    layout, rows, wide = update_layout([("loss", length, "BF16")]), [], []
    for number in range(2):
        values = draw.standard_normal(length).astype(np.float32)
        path = tmp_path / str(number)
        path.write_bytes(b"".join(payload_bytes(layout, {"loss": narrow(values)[0]})))
        rows.append(update_rows(path)["loss"])
        wide.append(widen(narrow(values)[0]))
    coefficients = np.array([0.25, -1.5])
    tracemalloc.start()
    K, norm = gram(rows, workers=1), sum(float(block @ block) for block in combine(coefficients, rows, workers=1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < length * 4 / 2  # half a row in float32
    assert K.tobytes() == gram(wide, workers=1).tobytes()
    assert norm == pytest.approx(coefficients @ K @ coefficients)


# ---- a member


def test_a_residual_counts_once_its_reply_is_accepted_and_not_after_a_refusal(tmp_path: Path) -> None:
    key, home, events = Ed25519PrivateKey.from_private_bytes(bytes(32)), WorkerHome(tmp_path), Events()
    spool = Spool(home, key, events)
    local_state = LocalState(home.kept, spool, events)
    order: Any = type("Order", (), {"work": TRAIN, "shape": SHAPE, "sharing": None})()

    def train(number: int) -> np.ndarray:
        """The residual that a round begins with, None for zeros; a reply goes to the spool."""
        order.manifest = AssignmentManifest(run_id="r", round=number)
        before = local_state.residual(order, lambda seconds: pytest.fail("nothing is awaited"))
        result = TRAIN.answer(client(before), Result({"loss": np.full(1000, 1.001, np.float32)}, {}, {}, 1))
        reply = ReplyManifest(assignment_id=f"a{number}", run_id="r", round=number)
        spool.add(reply, None, {}, sign(order.manifest, key), state=local_state.file(order, result))
        return np.zeros(1000) if before is None else before

    assert set(train(0)) == {0.0}
    spool.remove("a0")  # refused
    assert kept_state(home.kept, "r").rounds() == []
    assert set(train(1)) == {0.0}
    (entry,) = spool.entries()
    local_state.commit(entry)
    spool.settle(entry)
    first = train(2)
    assert set(first) == {np.float32(1.001) - np.float32(1.0)}
    spool.remove("a2")  # refused: what the accepted reply left is still there
    assert train(3).tobytes() == first.tobytes()


RUN = """
task = "digits"
rounds = 3
seed = 5
algorithm.name = "fedmgda+"
selection = { pool = "enrolled", minimum = 2, quorum = 1.0 }
train = { steps = 6, batch_size = 20, learning_rate = 0.2, wire_dtype = "bf16" }
simulation = { clients = 2, partition = "shards:2" }
"""
CLIENTS = ("client-000", "client-001")
NAMED = ('name = "half"\n' + RUN).encode()


@pytest.mark.full
def test_a_federation_and_a_simulation_come_to_the_same_bytes_whatever_dies(tmp_path: Path) -> None:
    simulated = simulate(NAMED, home=tmp_path / "home", threads=1)

    def work(name: str, crash: str = "") -> Any:
        part = f"{CLIENTS.index(name) + 1}/2"
        return fed.work(name, "--set", f"part={part}", "--set", "partition=shards:2", crash=crash)

    with federation(tmp_path) as fed:
        fed.serve()
        for name in CLIENTS:
            fed.join(name)
        work(CLIENTS[1])
        dying = work(CLIENTS[0], "spooled")
        fed.attending(*CLIENTS)
        run = fed.submit("half", RUN)
        for crash in ("before-receipt", "after-receipt", ""):
            dying.wait_killed()
            dying = work(CLIENTS[0], crash)

        def blob(name: str) -> Path:
            kind, _, value = name.partition(":")
            return fed.home / "blobs" / kind / value[:2] / value[2:]

        assert read_vector(blob(fed.wait_completed(run)))[1].tobytes() == simulated.model.tobytes()
        for name in CLIENTS:
            kept = kept_state(fed.directory / name / "kept", run).path(2)
            assert kept.read_bytes() == (tmp_path / "home" / "kept" / name / "2.safetensors").read_bytes()
        sizes = [row[0] for row in fed.query("select payload_bytes from replies where payload_bytes > 0")]
        assert len(sizes) == 6
        assert max(sizes) < initial_model(task("digits"), 0)[0].data_bytes / 2 + 1000
        for step, stored in fed.query("select step, gram from rounds"):
            signed = StepManifest.FromString(SignedEnvelope.FromString(step).manifest)
            names = dict(zip("ab", signed.replies, strict=True))
            found = fed.query(
                "select payload from replies where envelope_digest in (:a, :b) order by client_id", **names
            )
            rows = [update_rows(blob(payload))["loss"].read().astype(np.float64) for (payload,) in found]
            np.testing.assert_allclose(np.load(blob(stored)), np.array(rows) @ np.array(rows).T, rtol=1e-12)


@pytest.mark.full
def test_a_simulation_goes_on_to_the_same_bytes_and_learns_as_float32_does(tmp_path: Path) -> None:
    whole = simulate(NAMED, home=tmp_path / "whole", threads=1)
    with Simulation(NAMED, tmp_path / "halted", threads=1) as simulation:

        def stop(progress: SimulationProgress) -> None:
            if progress.done == 1:
                simulation.stop()

        simulation.run(stop)
    again = simulate(NAMED, home=tmp_path / "halted", resume=True, threads=1)
    assert again.model.tobytes() == whole.model.tobytes()
    exact = simulate(NAMED.replace(b', wire_dtype = "bf16"', b""), threads=1)
    assert 0 < np.abs(whole.model - exact.model).max() < 2e-3
    up, full = (history.rounds["bytes/up"].sum() for history in (whole, exact))
    assert 0.5 < up / full < 0.51


# ---- what is refused


def test_private_rounds_send_no_bfloat16() -> None:
    document = 'name = "a"\ntask = "digits"\nrounds = 1\nalgorithm.name = "fedavg-n"\nprivacy.secure = "sum"\n'
    parse_run(document)
    with pytest.raises(SpecError, match=r"train\.wire_dtype: members of a private round send masked sums"):
        parse_run(document + 'train.wire_dtype = "bf16"\n')


def test_payloads_that_are_not_what_was_asked_get_exact_reasons(stage: Stage) -> None:
    players = stage.cast(name := stage.task(), "ann", "ben", "cleo", "dan")
    more = 'train.wire_dtype = "bf16"\nselection = { minimum = 1, quorum = 0.1 }'
    run = stage.submit(spec("half", name, more=more))
    ann, ben, cleo, dan = players
    size = LAYOUT.size

    def submit(player: Any, raw: np.ndarray, dtype: str = "BF16", more: bytes = b"", manifest: str = "BF16") -> None:
        order = player.order() if player.name not in kept else kept[player.name]
        kept[player.name] = order
        payload = b"".join(payload_bytes(update_layout([("loss", len(raw), dtype)]), {"loss": raw})) + more
        update = player.member.manifest(order, payload)
        update.rows[0].dtype = manifest
        player.member.submit(player.member.sign(update), payload)

    kept: dict[str, Any] = {}
    ones = narrow(np.ones(size, np.float32))[0]
    with refused("INVALID_ARGUMENT", "mismatch:rows"):  # the assignment stays open
        submit(ann, ones, manifest="F32")
    with refused("INVALID_ARGUMENT", "layout"):
        submit(ann, ones[:-1])
    with refused("RESOURCE_EXHAUSTED", "limit:payload"):
        submit(ben, np.ones(size, np.float32), dtype="F32")
    with refused("RESOURCE_EXHAUSTED", "limit:payload"):
        submit(ben, ones, more=b"\0\0")
    infinite = ones.copy()
    infinite[-1] = 0x7F80
    with refused("INVALID_ARGUMENT", "non-finite"):
        submit(ben, infinite)
    with refused("INVALID_ARGUMENT", "zero"):
        submit(cleo, np.zeros(size, np.uint16))
    submit(dan, ones)
    outcomes = stage.outcomes(run)
    assert [outcomes[player.name][1] for player in (ann, ben, cleo)] == ["layout", "non-finite", "zero"]
    assert outcomes["dan"][0] == "FULFILLED"
    stage.stop_run(run)
