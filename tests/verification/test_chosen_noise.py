"""A coordinator that chooses the noise which protects clients chooses the model: what is refused, and what is said."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from federation.digests import digest
from federation.record.bundle import BundleReader, blob_entry
from federation.record.noise_rows import largest_magnitude, mean_square_tolerance, noise_defect
from federation.spec.noise import Noise
from federation.trust.envelope import envelope_digest
from federation.v1.common_pb2 import ReplyManifest, StepManifest
from federation.v1.record_pb2 import LogRecord, RoundRecord
from federation.vectors import Layout, Tensor, to_bytes, update_layout, update_rows
from storage.models import Round
from tests.stage import Stage
from tests.storage.scene import blob_file
from tests.verification.scene import Edited, command, exported, log_signed_again, played, signed_again

Doubles = NDArray[np.float64]
SAID = "the coordinator chose the noise; the model is not verified"


class Forger:
    """A coordinator that writes the step of a run anew, with noise of its choice, and signs with its own keys."""

    def __init__(self, stage: Stage, path: Path) -> None:
        self.stage = stage
        self.run = played(stage, "fedmgda+", "privacy.client_noise = 2.0\nalgorithm.epsilon = 0.05", rounds=1)
        self.bundle = exported(stage, self.run, path / "run.fedpareto")
        self.record = Edited.of(self.bundle)
        record = self.record.round(0)
        self.step = StepManifest.FromString(record.step.manifest)
        answers = [answer.reply for exchange in record.phases[0].exchanges for answer in exchange.answers]
        payloads = {envelope_digest(reply): ReplyManifest.FromString(reply.manifest).payload for reply in answers}
        with BundleReader(self.bundle) as reader:
            self.layout, base = reader.model(self.step.base_model)
            self.base = base.read().astype(np.float64)
            rows = [row.read() for name in self.step.replies for row in reader.rows(payloads[name]).values()]
        self.direction = np.array(self.step.coefficients) @ np.array(rows, np.float64)

    def noise_for(self, model: Doubles) -> Doubles:
        """The noise with which the step arrives at a model."""
        noise: Doubles = ((self.base - model) / self.step.rate - self.direction) / self.step.noise_scale
        return noise

    def forged(self, noise: Doubles, payload: bytes | None = None) -> Edited:
        """The record with this noise, in a file of its own form if one is given, and all that follows from it."""
        row = noise.astype(np.float32)
        payload = payload or to_bytes(update_layout([("noise", len(row))]), row)
        direction = self.direction + self.step.noise_scale * row.astype(np.float64)
        model = to_bytes(self.layout, (self.base - self.step.rate * direction).astype(np.float32))

        def of_step(step: StepManifest) -> None:
            step.noise, step.result_model = digest(payload), digest(model)

        def of_round(record: RoundRecord) -> None:
            signed_again(record.step, StepManifest, self.stage.served.home.signing_key, of_step)

        edited = self.record.with_round(0, of_round).telling(lambda about: setattr(about, "model", digest(model)))

        def of_log(log: LogRecord) -> None:
            (entry,) = [entry for entry in log.entries if entry.action == "round.stepped"]
            entry.digest = envelope_digest(edited.round(0).step)
            log_signed_again(log, self.stage.served.home.log_key.key)

        blobs: dict[str, bytes | None] = {blob_entry(self.step.noise): None, blob_entry(self.step.result_model): None}
        return edited.with_log(of_log).having({**blobs, **{blob_entry(digest(one)): one for one in (payload, model)}})


@pytest.fixture(scope="module")
def forger(_module_stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Forger:
    return Forger(_module_stage, tmp_path_factory.mktemp("forger"))


def gaussian(size: int, seed: int) -> Doubles:
    return np.random.default_rng(seed).standard_normal(size)


def with_length(values: Doubles) -> Doubles:
    """The vector with a mean square of 1."""
    scaled: Doubles = values * np.sqrt(len(values) / (values @ values))
    return scaled


def test_a_coordinator_that_sets_every_parameter_to_42_through_the_noise_is_refused(
    forger: Forger, tmp_path: Path
) -> None:
    edited = forger.forged(forger.noise_for(np.full(forger.layout.size, 42.0))).write(tmp_path / "edited")
    with BundleReader(edited) as reader:
        np.testing.assert_allclose(reader.model(reader.about.model)[1].read(), 42, rtol=1e-6)
    code, said = command("verify", str(edited))
    assert code == 1, said
    assert "round 0: the noise blake3:" in said
    assert "the mean square of its 45 numbers is" in said


def test_the_model_of_a_run_with_noise_is_never_said_to_be_verified(forger: Forger) -> None:
    code, said = command("verify", str(forger.bundle))
    assert code == 3, said
    assert f"round 0: not verified, because {SAID}" in said
    assert "was verified" not in said
    code, said = command("verify", str(forger.bundle), "--json")
    document = json.loads(said[: said.rindex("}") + 1])
    assert (code, document["verified"], document["rounds"][0]["missing"]) == (3, False, [SAID])


def test_noise_that_looks_like_noise_and_points_where_the_coordinator_wants_is_taken_and_not_called_verified(
    forger: Forger, tmp_path: Path
) -> None:
    target = with_length(np.abs(gaussian(45, 1)))  # every parameter is lowered
    code, said = command("verify", str(forger.forged(target).write(tmp_path / "edited")))
    assert (code, SAID in said) == (3, True), said


def test_noise_of_another_length_with_an_extreme_or_of_another_form_is_refused(forger: Forger, tmp_path: Path) -> None:
    noise = with_length(gaussian(45, 2))
    one_large, not_finite = np.full(45, 0.1), noise.copy()
    one_large[7], not_finite[7] = 7.1, np.nan  # the mean square is 1.13
    twice = to_bytes(update_layout([("noise", 45), ("more", 45)]), np.tile(noise, 2).astype(np.float32))
    narrow = Layout((Tensor("noise", (45,), "BF16"),)).header + bytes(90)
    refused: Mapping[str, tuple[Doubles, bytes | None]] = {
        "the mean square of its 45 numbers is 2.3": (noise * np.sqrt(2.3), None),
        "its largest magnitude is 7.1; noise of 45 numbers has at most 7.004": (one_large, None),
        "it has a number that is not finite": (not_finite, None),
        "it is not one row of float32 numbers": (noise, twice),
        ": it is not one row of float32 numbers": (noise, narrow),
    }
    for words, (values, payload) in refused.items():
        code, said = command("verify", str(forger.forged(values, payload).write(tmp_path / "edited")))
        assert (code, words in said) == (1, True), said


def test_the_audit_names_noise_that_is_too_long_and_nothing_in_an_honest_run(forger: Forger) -> None:
    stage, home = forger.stage, str(forger.stage.served.home.admin_dir)
    assert command("admin", "--home", home, "audit", "verify")[0] == 0
    row = forger.noise_for(np.full(forger.layout.size, 42.0)).astype(np.float32)
    with stage.blobs.writer() as writer:
        writer.write(to_bytes(update_layout([("noise", len(row))]), row))
        chosen = writer.commit()

    def note(noise: str) -> None:
        with stage.served.database.begin() as session:
            session.query(Round).filter_by(run_id=forger.run).one().noise = noise

    note(chosen)
    try:
        code, said = command("admin", "--home", home, "audit", "verify")
        words = f"wrong: round {forger.run}/0: the noise {chosen}: the mean square of its 45 numbers is"
        assert (code, words in said) == (1, True), said
        assert "the mean square" not in command("admin", "--home", home, "audit", "verify", "--skip-blobs")[1]
    finally:
        note(forger.step.noise)
        blob_file(stage.blobs, chosen).unlink()


# --- the bounds


def test_the_noise_that_a_coordinator_draws_passes_and_all_of_it_counts(tmp_path: Path) -> None:
    path, noise = tmp_path / "noise", Noise().gaussian(1_200_000)

    def defect() -> str:
        path.write_bytes(to_bytes(update_layout([("noise", len(noise))]), noise.astype(np.float32)))
        return noise_defect(update_rows(path).values())

    assert defect() == ""
    noise[-1] = -8.4
    assert "its largest magnitude is 8.4" in defect()
    noise[:] = 0  # which would protect nobody
    assert "the mean square of its 1,200,000 numbers is 0" in defect()


@pytest.mark.parametrize(
    ("size", "tolerance", "largest", "alarm"),
    [
        (45, 1.265, 7.004, 3e-6),
        (1_000, 0.2683, 7.434, 2e-8),
        (4_810, 0.1223, 7.642, 5e-9),
        (10**6, 0.008485, 8.311, 3e-9),
    ],
)
def test_honest_noise_is_refused_with_the_probability_that_the_documents_say(
    size: int, tolerance: float, largest: float, alarm: float
) -> None:
    from scipy import stats

    assert mean_square_tolerance(size) == pytest.approx(tolerance, rel=1e-3)
    assert largest_magnitude(size) == pytest.approx(largest, rel=1e-3)
    low, high = (size * (1 + sign * mean_square_tolerance(size)) for sign in (-1, 1))
    of_the_length = stats.chi2.cdf(low, size) + stats.chi2.sf(high, size)
    of_the_extremes = size * 2 * stats.norm.sf(largest_magnitude(size))
    assert of_the_extremes < 1e-9
    assert alarm / 3 < of_the_length + of_the_extremes < alarm
