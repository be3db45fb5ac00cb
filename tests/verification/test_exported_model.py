"""An exported model says which run and round made it, and carries the digest of the record."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from federation.digests import digest
from federation.record.bundle import BundleReader
from federation.record.provenance import Provenance, read_exported, with_provenance
from federation.refusals import Refusal
from federation.v1 import admin_pb2 as admin
from federation.vectors import Layout, Tensor, read_vector
from fedpareto.cli.admin import download
from tests.stage import LAYOUT, MODEL, Stage
from tests.verification.scene import command, exported, played
from verification.errors import VerificationError
from verification.exported import CheckedModel, check_model
from verification.run import OpenedRun


def export(stage: Stage, run: str, path: Path, number: int | None = None) -> Path:
    """A model of a run, as an administrator gets it."""
    download.save(stage._admin.ExportModel(admin.ExportModelRequest(run=run, round=number), timeout=60), path)
    return path


def checked(bundle: Path, model: Path) -> CheckedModel:
    with BundleReader(bundle) as reader:
        run = OpenedRun.of(reader)
        list(run.verify())
        return check_model(run, model)


def told(path: Path) -> Provenance:
    found = read_exported(path, "blake3")[1]
    assert found is not None
    return found


def changed(path: Path, values: Mapping[str, str]) -> Path:
    """The same model, with another provenance."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    other = path.with_name("changed.safetensors")
    other.write_bytes(with_provenance(data[:end], replace(told(path), **values)) + data[end:])
    return other


@pytest.mark.full
@pytest.mark.parametrize("rule", ["fedavg", "afl"])  # the second deploys a mean of models
def test_the_models_of_a_run_carry_the_digest_of_its_record(stage: Stage, tmp_path: Path, rule: str) -> None:
    run = played(stage, rule, "", rounds=2)
    models = {number: export(stage, run, tmp_path / f"{number}.safetensors", number) for number in (0, 1, None)}
    played(stage, rule, "", rounds=1)  # the log goes on
    assert export(stage, run, tmp_path / "again.safetensors").read_bytes() == models[None].read_bytes()
    bundles = [exported(stage, run, tmp_path / f"{kept}.fedpareto", payloads=kept) for kept in (True, False)]
    for bundle in bundles:
        for number, path in models.items():
            which = 1 if number is None else number
            words = f"{path.name} is the model of round {which}, and carries the digest of this record"
            assert checked(bundle, path) == CheckedModel(words)
    assert read_vector(models[0])[0] == LAYOUT
    assert read_exported(models[0], "blake3")[0] != digest(models[0].read_bytes())


@pytest.mark.full
def test_a_model_of_a_run_that_goes_on_carries_the_digest_of_the_record_up_to_it(stage: Stage, tmp_path: Path) -> None:
    run, players = stage.begin("ann", "ben", rounds=2, more="evaluate.every = 0")
    first = export(stage, run, tmp_path / "first.safetensors")
    orders = [player.order() for player in players]
    for player, order in zip(players, orders, strict=True):
        player.reply(order)
    stage.wait_round(run, 0)
    early = export(stage, run, tmp_path / "early.safetensors")
    before = exported(stage, run, tmp_path / "before.fedpareto")
    stage.play(run, *players)
    late = export(stage, run, tmp_path / "late.safetensors")
    after = exported(stage, run, tmp_path / "after.fedpareto")
    for bundle in (before, after):
        assert checked(bundle, early).words.endswith(
            "round 0, and carries the digest of this record up to its step: "
            "the run had not ended when the model was exported"
        )
        assert "the model that the run began with, and carries" in checked(bundle, first).words
    assert checked(after, late).words.endswith("round 1, and carries the digest of this record")
    with pytest.raises(VerificationError, match="no round of the run has made this model"):
        checked(before, late)


@pytest.mark.full
def test_a_model_of_another_run_or_record_is_named(stage: Stage, tmp_path: Path) -> None:
    run, other = played(stage, "fedavg", "", rounds=2), played(stage, "fedavg", "", rounds=2)
    bundle = exported(stage, run, tmp_path / "run.fedpareto", payloads=False)
    model = export(stage, run, tmp_path / "model.safetensors")
    foreign = export(stage, other, tmp_path / "foreign.safetensors")
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    edited = tmp_path / "edited.safetensors"
    edited.write_bytes(data)
    wrong = {
        foreign: f"says that it is of run {other}",
        edited: "no round of the run has made this model",
        bundle: "run.fedpareto: it is a zip archive of other files, no safetensors file",
    }
    for path, words in wrong.items():
        with pytest.raises(VerificationError, match=words):
            checked(bundle, path)
    entries = int(told(model).entries)
    of_other = told(foreign)
    for values, words in [
        ({"round": "0"}, "says that it is the model of round 0; it is the model of round 1"),
        ({"record": f"sha256:{'0' * 64}"}, "the bundle has another"),
        ({"record": of_other.record, "entries": of_other.entries}, "the bundle has another"),
        ({"entries": "many"}, "the bundle has another"),
        ({"entries": str(entries - 1)}, "the bundle has another"),
        ({"federation": "other"}, "says that it is of run"),
    ]:
        with pytest.raises(VerificationError, match=words):
            checked(bundle, changed(model, values))
    bare = tmp_path / "bare.safetensors"
    bare.write_bytes(LAYOUT.header + data[-4 * LAYOUT.size : -1] + bytes([data[-1] ^ 1]))
    found = checked(bundle, bare)
    assert found == CheckedModel(
        "bare.safetensors is the model of round 1", "bare.safetensors carries no digest of the record"
    )


@pytest.mark.full
def test_the_command_says_which_model_it_is(stage: Stage, tmp_path: Path) -> None:
    run = played(stage, "fedavg", "", rounds=1)
    bundle = exported(stage, run, tmp_path / "run.fedpareto")
    model = export(stage, run, tmp_path / "model.safetensors")
    code, output = command("verify", str(bundle), "--model", str(model))
    assert code == 0, output
    assert "model.safetensors is the model of round 0, and carries the digest of this record" in output
    assert f"digest of the record: {told(model).record}" in output
    bare = tmp_path / "initial.safetensors"
    bare.write_bytes(MODEL)
    code, output = command("verify", str(bundle), "--model", str(bare))
    assert (code, "not verified, because initial.safetensors carries no digest" in output) == (3, True)
    (tmp_path / "other.safetensors").write_bytes(MODEL[:-1] + b"\x07")
    code, output = command("verify", str(bundle), "--model", str(tmp_path / "other.safetensors"), "--json")
    assert (code, "no round of the run has made this model" in output) == (1, True)


def test_metadata_of_others_stay_and_what_is_no_model_is_refused(tmp_path: Path) -> None:
    origin = Provenance(federation="f", run="r", round="", record="", entries="")
    plain = Layout((Tensor("läyer", (2,)),)).header
    text = b'{"__metadata__":{"format":"pt"},' + plain[9:].rstrip()
    text += b" " * (-len(text) % 8)
    theirs = len(text).to_bytes(8, "little") + text
    path = tmp_path / "model.safetensors"
    for header in (plain, theirs):
        path.write_bytes(with_provenance(header, origin) + bytes(8))
        assert len(with_provenance(header, origin)) % 8 == 0
        assert read_exported(path, "blake3") == (digest(header + bytes(8)), origin)
        assert read_vector(path)[0].tensors[0].name == "läyer"
    for data in (b"", b"x" * 7, (3).to_bytes(8, "little") + b"[1]", (9).to_bytes(8, "little") + b"{", bytes(8)):
        path.write_bytes(data)
        with pytest.raises(Refusal):
            read_exported(path, "blake3")
    with pytest.raises(Refusal, match="at most"):
        with_provenance(plain, replace(origin, record="x" * 10_010_000))
