"""`fedpareto worker model`: the model of a run in which this member has contributed."""

import json
import math
import random
import secrets
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from shutil import copyfileobj
from typing import Annotated, Any

import typer

from federation.text import counted, escaped
from fedpareto.cli.failure import USAGE, CommandFailure, answer, failing
from fedpareto.cli.member.member_command import MemberSite, member_command
from fedpareto.cli.member.personal import write_personal
from fedpareto.cli.shared_options import ForceOption
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from federation import vectors
    from federation.record.provenance import Provenance, with_provenance
    from federation.transport.proxies import RouteError
    from federation.trust.keys import replace_private
    from federation.v1.common_pb2 import OwnShare, RunState
    from federation.v1.federation_pb2 import GetModelRequest
    from fedpareto.cli.show.model_card import CardFacts, CardScore, write_card
    from fedpareto.cli.whole_file import whole_file
    from fedpareto.formatting import number
    from worker.connection.backoff import Backoff
    from worker.ledgers.left_ledger import LeftLedger, ReplyShare
    from worker.progress import StatementError, last_restore
    from worker.receipts import ReceiptsError, receipt_lines, verified_receipts
    from worker.results.comparison import Compared, compared
    from worker.results.fetched_model import alone, fetched_model
    from worker.results.run_model import ModelDisputed, RunModel, RunModelError, ask
    from worker.site.policy_file import Policy, PolicyError


@member_command(RunModelError, ModelDisputed, ReceiptsError, StatementError, RouteError, calls=True, alone=False)
def model_command(
    site: MemberSite,
    as_json: bool,
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's id, the beginning of its id, or its name.")],
    out: Annotated[
        Path | None, typer.Option(help="The file to write, safetensors. Default: the run's name, in this directory.")
    ] = None,
    best: Annotated[
        str,
        typer.Option(
            "--best",
            metavar="METRIC",
            help="The best model by the members' mean accuracy, loss or metric of the task. Default: the newest model.",
        ),
    ] = "",
    split: Annotated[str, typer.Option(help="With --best: train, validation or test.")] = "validation",
    personal: Annotated[
        bool, typer.Option("--personal", help="Also write this member's personal parameters, beside the file.")
    ] = False,
    card: Annotated[
        Path | None, typer.Option("--card", metavar="FILE", help="Also write the model's card: Markdown, or .json.")
    ] = None,
    force: ForceOption = False,
) -> None:
    """Write a model of a run that this member has contributed to.

    The worker may run meanwhile. The coordinator signs which step made the model; the command compares this with the
    assignments and receipts of this member, and says so, or else that it is by the coordinator's word. It ends with an
    error, and writes nothing, if the coordinator contradicts what it has signed before. A download that breaks off goes
    on when the command is given again. With downloads_from in policy.toml, it can come from the coordinator's bucket.

    It also shows the weight of this member's replies, and what was measured of the model: this member's own values, and
    from five members on the mean and the worst, if the run discloses them.
    """
    # Read before the question: what comes later may be of a newer step.
    lines = receipt_lines(site.home.receipts) if site.home.receipts.exists() else []
    _check_free(force, *filter(None, (out, card)))
    address, channel = site.member.serving_channel()
    with channel:
        request = GetModelRequest(run=run, nonce=secrets.token_bytes(32), best=best, split=split if best else "")
        asked = ask(site.member, address, channel, request)
    given = asked.manifest
    receipts = verified_receipts(lines, site.home.receipts, site.member.coordinator.chain, about=given.run_id)
    found = compared(asked, receipts, last_restore(site.home.progress, site.member))
    target = out or Path(f"{given.name}.safetensors")
    beside = target.with_name(f"{target.stem}-personal{target.suffix}") if personal else None
    _check_free(force, *filter(None, (target, beside)))
    with failing(PolicyError):
        hosts = Policy.load(site.home.policy).download_addresses
    with failing(OSError, what=f"cannot write {target}"), alone(site.home.models):
        path = fetched_model(
            site.home.models,
            site.member,
            asked,
            Backoff(random.uniform),
            lambda text: typer.echo(text, err=True),
            hosts,
        )
        _export(path, target, asked)
    kept = write_personal(site.home, given.run_id, beside) if beside is not None else None
    if card is not None:
        write_card(_card_facts(asked, found), card, target, as_json=as_json)
    document = {**_document(asked, found), "file": str(target), "personal": kept, "card": str(card) if card else None}
    with failing(OSError, what=f"cannot write {site.home.models}"):
        replace_private(site.home.models / f"{given.run_id}.json", json.dumps(document).encode() + b"\n")
    _note_shares(site.home.left, given.shares)
    answer(as_json, document, *_lines(asked, found, target, kept, card))


def _note_shares(ledger: Path, shares: "Iterable[OwnShare]") -> None:
    """Fills the weights and coefficients of this member's replies into its record of what left."""
    if not ledger.exists():  # no worker of this version has run here
        return
    with closing(LeftLedger(ledger)) as left:
        left.learn(ReplyShare(share.reply, share.weight, share.coefficient) for share in shares)


def _check_free(force: bool, *files: Path) -> None:
    """Raises a CommandFailure if one of the files is there."""
    for file in files:
        if file.exists() and not force:
            raise CommandFailure(f"{file} exists: give --force to overwrite it", code=USAGE)


def _export(path: Path, target: Path, asked: "RunModel") -> None:
    """Writes a model with metadata about its origin."""
    given = asked.manifest
    origin = Provenance(
        federation=given.federation_id, run=given.run_id, round=str(given.round), record=given.record,
        entries=str(given.entries) if given.record else "",
    )  # fmt: skip
    with path.open("rb") as source, whole_file(target) as file:
        head = source.read(vectors.LENGTH_BYTES)
        file.write(with_provenance(head + source.read(vectors.header_length(head)), origin))
        copyfileobj(source, file)


def _document(asked: "RunModel", found: "Compared") -> dict[str, Any]:
    given = asked.manifest
    return {
        "run": given.run_id,
        "name": given.name,
        "task": given.task,
        "state": _state(asked),
        "round": given.round,
        "step": given.step,
        "digest": given.model,
        "size": given.model_bytes,
        "compared": {"round": found.round, "words": found.words},
        "members": given.members,
        "shares": [
            {"round": share.round, "weight": _plain(share.weight), "coefficient": _plain(share.coefficient)}
            for share in given.shares
        ],
        "scores": [
            {
                "split": score.split, "metric": score.metric, "own": _plain(score.own), "members": score.members,
                "mean": _plain(score.mean), "worst": _plain(score.worst),
            }
            for score in given.scores
        ],
        "numbers": {name: _plain(value) for name, value in sorted(given.numbers.items())},
    }  # fmt: skip


def _lines(
    asked: "RunModel", found: "Compared", target: Path, kept: dict[str, Any] | None, card: Path | None
) -> Iterator[str]:
    given = asked.manifest
    run = f"run {given.name} ({given.run_id}, {_state(asked).lower()})"
    yield f"{target}: the model of {run} after round {given.round}, {given.model_bytes:,} bytes, {given.model}"
    yield found.words
    if given.members:
        yield f"the step was made from replies of {counted(given.members, 'member')}"
    if given.shares:
        last = max(given.shares, key=lambda share: share.round)
        part = "" if math.isnan(last.coefficient) else f", coefficient {last.coefficient:.6g}"
        yield f"this member's last reply in a step, of round {last.round}: weight {last.weight:.6g}{part}"
    for score in given.scores:
        told = [] if math.isnan(score.own) else [f"own {number(score.own)}"]
        if score.members:
            told += [f"mean of {counted(score.members, 'member')} {number(score.mean)}"]
            told += [] if math.isnan(score.worst) else [f"worst {number(score.worst)}"]
        yield escaped(f"{score.split} {score.metric}: {', '.join(told)}")
    if kept is not None:
        yield f"{kept['file']}: {kept['parameters']} personal parameters after round {kept['round']}"
    if card is not None:
        yield f"{card}: the card of the model"


def _card_facts(asked: "RunModel", found: "Compared") -> "CardFacts":
    """The facts of a card. It has nothing of this member's own, since it goes to others."""
    given = asked.manifest
    scores = [
        CardScore(split=one.split, metric=one.metric, members=one.members, mean=one.mean, worst=one.worst)
        for one in given.scores
        if one.members
    ]
    return CardFacts(
        federation=given.federation_id, run=given.run_id, name=given.name, state=_state(asked), round=given.round,
        model=given.model, size=given.model_bytes, step=given.step, record=given.record, spec=asked.spec,
        spec_digest=given.spec, members=given.members, names=(), scores=scores, numbers=dict(given.numbers),
        source=f"The coordinator signed these facts for a member of the federation; {found.words}.",
    )  # fmt: skip


def _state(asked: "RunModel") -> str:
    return RunState.Name(asked.manifest.state).removeprefix("RUN_STATE_")


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
