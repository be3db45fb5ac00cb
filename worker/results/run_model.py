"""The coordinator's signed answer to "which model has this run made": the call, and the checks of the answer.

The coordinator chooses every value in it. A coordinator that was taken over can give no other model than it signs, and
none to anybody else; `comparison` compares what it signs with what it has signed before.
"""

import math
import re
from dataclasses import dataclass

import grpc

from federation.digests import digest, model_name, parse
from federation.errors import Error
from federation.refusals import Refusal
from federation.spec.run_spec import RunSpec, SpecError
from federation.text import escaped
from federation.trust.key_chain import CoordinatorKeys
from federation.trust.member_files import MemberFiles
from federation.v1.common_pb2 import ModelManifest, RunState, SignedEnvelope
from federation.v1.federation_pb2 import GetModelRequest, GetModelResponse
from federation.v1.federation_pb2_grpc import FederationStub

CALL_SECONDS = 60.0
MAX_ROUND = 2**31 - 1
MAX_MANIFEST_BYTES = 512 << 10
_RUN_ID = re.compile(r"[a-z0-9.-]{1,63}")
_SPLIT = re.compile(r"train|validation|test")
_METRIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,127}")
_MOST = 1000  # shares, scores and numbers


class RunModelError(Error):
    """The model was not fetched; the message says why and what to do."""


class ModelDisputed(Error):
    """What the coordinator signs of a model contradicts what it has signed before, or is not an answer to the question.

    The message says what and where.
    """


@dataclass(frozen=True, eq=False)
class RunModel:
    """The coordinator's answer, whose signature and form are verified.

    Attributes:
        envelope: as signed; it is also the right to fetch the model.
        manifest: its content.
        spec: the run's specification.
        newest: True if the newest model was asked for.
    """

    envelope: SignedEnvelope
    manifest: ModelManifest
    spec: RunSpec
    newest: bool


def ask(member: MemberFiles, address: str, channel: grpc.Channel, request: GetModelRequest) -> RunModel:
    """Asks the coordinator at `address` for the model of a run; `request` has a new nonce.

    Raises:
        RunModelError: it refuses or cannot be reached.
        ModelDisputed: its answer cannot be accepted.
    """
    try:
        response = FederationStub(channel).GetModel(request, timeout=CALL_SECONDS)
    except grpc.RpcError as error:
        refusal = member.refusal(error, address)
        if refusal.status == "UNIMPLEMENTED":
            raise RunModelError(
                f"the coordinator at {address} is of a version that gives members no models: ask its operator"
            ) from error
        reason = ": ".join(part for part in (refusal.reason, refusal.message or refusal.status) if part)
        raise RunModelError(f"{address} gives no model: {escaped(reason)}") from error
    return checked(member, request, response)


def checked(member: MemberFiles, request: GetModelRequest, response: GetModelResponse) -> RunModel:
    """The coordinator's answer to this member's request. Raises ModelDisputed unless it can be one."""
    manifest = _opened(member, response)
    expected = {"federation_id": member.federation_id, "client_id": member.client_id, "nonce": request.nonce}
    for name, value in expected.items():
        _require(getattr(manifest, name) == value, f"it is signed for another {name.partition('_')[0]}")
    run = manifest.run_id
    _require(_RUN_ID.fullmatch(run) is not None, f"{escaped(run, 80)!r} is no id of a run")
    named = request.run in (run, manifest.name) or run.startswith(request.run)
    _require(
        named, f"it is of the run {run} ({escaped(manifest.name, 80)}), and {escaped(request.run, 80)!r} was asked for"
    )
    _require(manifest.round <= MAX_ROUND, f"it is of round {manifest.round}, which no run reaches")
    _require(manifest.state in RunState.values(), f"the run has the unknown state {manifest.state}")
    try:
        parse(manifest.step)
        for model in (manifest.model, manifest.result_model):
            model_name(model)
    except ValueError as error:
        raise ModelDisputed(f"the coordinator's answer cannot be used: {escaped(str(error))}") from None
    _require(digest(response.spec) == manifest.spec, "the specification beside it is not the one that it names")
    try:
        spec = RunSpec.parse(response.spec)
    except SpecError as error:
        raise ModelDisputed(
            f"the run's specification cannot be read here ({escaped(str(error))}): if the coordinator is of a newer "
            "version, install that version"
        ) from None
    _require((spec.name, spec.task) == (manifest.name, manifest.task), "its name or task is not of the specification")
    _check_numbers(manifest)
    return RunModel(response.model, manifest, spec, newest=not request.best)


def _opened(member: MemberFiles, response: GetModelResponse) -> ModelManifest:
    size = response.model.ByteSize()
    _require(size <= MAX_MANIFEST_BYTES, f"it has {size} bytes; at most {MAX_MANIFEST_BYTES} are read")
    try:
        # The running worker keeps the rotations that it follows; here they hold for this command alone.
        keys = CoordinatorKeys(member.federation_id, member.coordinator.first, member.coordinator.rotations)
        keys.learn(response.rotations)
        # Protocol, The envelope: the signature first: no other check may depend on bytes that nobody has signed.
        return keys.verify(response.model, ModelManifest)
    except Refusal as refusal:
        raise ModelDisputed(
            f"the answer is not signed by the coordinator that this member knows ({escaped(str(refusal))})"
        ) from None


def _check_numbers(manifest: ModelManifest) -> None:
    """Checks the names and numbers about the run, which are shown and written into files."""
    many = max(len(manifest.shares), len(manifest.scores), len(manifest.numbers))
    _require(many <= _MOST, f"it has {many} rows of numbers; at most {_MOST} are read")
    for share in manifest.shares:
        _require(share.round <= manifest.round, f"it tells of a reply of round {share.round}, after the model")
    for score in manifest.scores:
        good = _SPLIT.fullmatch(score.split) and _METRIC.fullmatch(score.metric)
        _require(bool(good), f"{escaped(f'{score.split} {score.metric}', 80)!r} is no measurement of a model")
    for name, value in manifest.numbers.items():
        _require(_METRIC.fullmatch(name) is not None, f"{escaped(name, 80)!r} is no name of a number")
        _require(not math.isnan(value), f"{name} is no number")
    record = manifest.record
    _require(re.fullmatch(r"(sha256:[0-9a-f]{64})?", record) is not None, f"{escaped(record, 80)!r} is no digest")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ModelDisputed(f"the coordinator's answer cannot be used: {problem}")
