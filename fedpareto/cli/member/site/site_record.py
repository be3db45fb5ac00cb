"""`fedpareto worker receipts`, `log` and `verify`: a site's replies, and their use."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from federation.text import counted, escaped
from fedpareto.cli.failure import NOT_VERIFIED, CommandFailure, answer
from fedpareto.cli.member.member_command import MemberSite, member_command
from fedpareto.cli.shared_options import CodeOption
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from federation.record.bundle import BundleError, BundleReader
    from federation.spec.run_spec import RunSpec
    from federation.trust.certificates import fingerprint, load_certificate
    from federation.trust.envelope import envelope_digest
    from federation.trust.identity import parse_peer
    from federation.trust.member_files import MemberFiles
    from federation.work.secure.orders import Owner
    from federation.work.site import DescribedEntry, SessionEntry
    from fedpareto.cli.show.tables import console, new_table
    from fedpareto.formatting import size
    from verification import errors
    from verification.own_replies import MemberReceipt as Held
    from verification.own_replies import (
        OwnWithdrawals,
        ReplyOutcome,
        compared_withdrawal,
        private_problems,
        reply_outcomes,
    )
    from verification.run import OpenedRun
    from worker.home import WorkerHome
    from worker.ledgers.round_ledger import RoundLedger
    from worker.receipts import Receipt, ReceiptsError, disagreements, read_receipts
    from worker.site.leaving import read_withdrawal
    from worker.site.policy_file import Policy, PolicyError


@member_command(ReceiptsError)
def receipts_command(
    site: MemberSite,
    as_json: bool,
    compare: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Another member's receipts.jsonl, to compare models and steps with."),
    ] = None,
) -> None:
    """List, verify and compare receipts of assignments and replies."""
    ours = _receipts(site)
    theirs = read_receipts(compare, site.member.coordinator.chain) if compare is not None else []
    if compare is None:
        answer(as_json, [asdict(receipt) for receipt in ours], *_lines(ours))
        return
    shared = {receipt.occasion for receipt in ours} & {receipt.occasion for receipt in theirs}
    pairs = disagreements(ours, theirs)
    answer(
        as_json,
        {"compared": len(shared), "disagreements": [{"ours": asdict(a), "theirs": asdict(b)} for a, b in pairs]},
        *_lines([receipt for pair in pairs for receipt in pair]),
        f"{counted(len(shared), 'occasion')} compared, with {counted(len(pairs), 'disagreement')}",
    )
    if pairs:
        raise CommandFailure(
            "the coordinator gave two members different models or steps: keep both files, and inform all members"
        )


def _receipts(site: MemberSite) -> "list[Receipt]":
    """The receipts of this site."""
    path = site.home.receipts
    return read_receipts(path, site.member.coordinator.chain) if path.exists() else []


def _lines(receipts: "Sequence[Receipt]") -> Iterator[str]:
    for receipt in receipts:
        run, number, phase = receipt.occasion
        outcome = "accepted" if receipt.accepted else f"refused, {receipt.reason}"
        yield escaped(
            f"{receipt.client_id} run {run} round {number} phase {phase}: base model {receipt.base_model[:23]}, "
            f"previous step {receipt.previous_step[:23] or '(none)'}, {outcome}"
        )


@member_command(ReceiptsError)
def log_command(site: MemberSite, as_json: bool) -> None:
    """Show what this site has contributed.

    By run and kind of work: rounds, replies that were accepted and refused, and bytes, from the site's own
    receipts. `fedpareto worker verify` shows the use of the replies in the steps.
    """
    entries_by_kind: dict[tuple[str, str], dict[str, Any]] = {}
    for receipt in _receipts(site):
        run, number, _ = receipt.occasion
        entry = entries_by_kind.setdefault(
            (run, receipt.kind),
            {
                "run": run,
                "task": receipt.task,
                "kind": receipt.kind,
                "rounds": set(),
                "accepted": 0,
                "refused": 0,
                "bytes": 0,
            },
        )
        entry["rounds"].add(number)
        entry["accepted" if receipt.accepted else "refused"] += 1
        entry["bytes"] += receipt.payload_bytes
    entries = [{**entry, "rounds": len(entry["rounds"])} for entry in entries_by_kind.values()]
    if as_json:
        answer(True, entries)
        return
    table = new_table("run", "task", "work", ">rounds", ">accepted", ">refused", ">sent")
    for entry in entries:
        counts = (str(entry[name]) for name in ("rounds", "accepted", "refused"))
        table.add_row(
            escaped(entry["run"]), escaped(entry["task"]), escaped(entry["kind"]), *counts, size(entry["bytes"])
        )
    if entries:
        console().print(table)
    else:
        typer.echo("this site has no receipts yet")


@member_command(ReceiptsError, BundleError, PolicyError)
def verify_command(
    site: MemberSite,
    as_json: bool,
    file: Annotated[Path, typer.Argument(help="The bundle of a run that `fedpareto admin bundle` wrote.")],
    code: CodeOption = None,
) -> None:
    """Verify that this site's replies are in the record of a run.

    First the record itself, as `fedpareto verify` does, with this member's CA. Then each receipt of this site: that the
    record has the same assignment, reply and receipt, and that an accepted update entered the step. It shows the
    coefficients with which the updates entered. Of private rounds it also verifies that each one that this site
    counts is in the record, and that this member's update was covered as policy.toml requires. A site that has left
    compares its signed withdrawal, too.

    Exit codes: 0 all was verified; 1 something is missing or differs, and is named; 3 nothing is wrong, and
    something could not be verified, such as models in a file without payloads.
    """
    problems, missing = [], list[str]()
    worker_home, member, _ = site
    receipts = _receipts(site)
    with BundleReader(file) as bundle:
        run_id = bundle.about.run_id
        held = [
            Held(
                assignment_id=receipt.assignment_id, round=receipt.occasion[1], phase=receipt.occasion[2],
                accepted=receipt.accepted, assignment=receipt.assignment, reply=receipt.reply, receipt=receipt.receipt,
            )
            for receipt in receipts
            if receipt.occasion[0] == run_id
        ]  # fmt: skip
        replies = list(reply_outcomes(bundle, member.client_id, held))
        problems += [f"round {reply.round} phase {reply.phase}: {reply.wrong}" for reply in replies if reply.wrong]
        try:
            opened = OpenedRun.of(bundle, fingerprint(load_certificate(member.ca)))
            for verified in opened.verify():
                missing += [f"round {verified.number}: not verified, because {reason}" for reason in verified.missing]
                missing += [f"round {verified.number}: the record lacks {part}" for part in verified.absent]
            if worker_home.rounds.exists():
                problems += private_problems(bundle, *_private_facts(worker_home, member, opened.facts.spec))
            departure = compared_withdrawal(opened.log, member.client_id, _own_withdrawals(worker_home, member))
            problems += filter(None, [departure.problem])
            missing += filter(None, [departure.missing])
        except errors.VerificationError as error:
            problems.append(f"the record does not verify: {error}")
    document = {
        "file": str(file),
        "run": run_id,
        "client_id": member.client_id,
        "receipts": len(held),
        "replies": [asdict(reply) for reply in replies],
        "problems": problems,
        "missing": missing,
        "verified": not problems and not missing,
    }
    answer(as_json, document, *_outcome_lines(replies), *map(escaped, missing))
    if problems:
        raise CommandFailure("\n".join(escaped(problem) for problem in problems))
    summary = "nothing is wrong; the record could not be verified in full" if missing else "all of it was verified"
    if not as_json:
        typer.echo(f"{counted(len(held), 'receipt')} of run {escaped(run_id)} compared with {file}: {summary}")
    if missing:
        raise typer.Exit(NOT_VERIFIED)


def _own_withdrawals(worker_home: "WorkerHome", member: "MemberFiles") -> "OwnWithdrawals":
    """The withdrawals that this site has signed since it joined last."""
    certificate, kept = parse_peer(member.certificate).serial, read_withdrawal(worker_home.withdrawal)
    if kept is None:
        return OwnWithdrawals(certificate=certificate)
    signed = frozenset(envelope_digest(each) for each in (kept.envelope, *kept.earlier))
    return OwnWithdrawals(certificate=certificate, signed=signed, left=kept.left)


def _private_facts(
    worker_home: "WorkerHome", member: "MemberFiles", spec: "RunSpec"
) -> "tuple[Sequence[SessionEntry | DescribedEntry], Owner, RunSpec]":
    """The private rounds that count at this site, and its owner's requirements for them."""
    policy, ledger = Policy.load(worker_home.policy), RoundLedger(worker_home.rounds)
    try:
        tasks = ledger.tasks()
        entries, described = ledger.entries(tasks), ledger.described(tasks)
    finally:
        ledger.close()
    return [*entries, *described], Owner(member.client_id, policy.secure.of(spec.task).effective_members or 0.0), spec


def _outcome_lines(replies: "Sequence[ReplyOutcome]") -> Iterator[str]:
    for reply in replies:
        weights = ", ".join(f"{value:.6g}" for value in reply.coefficients)
        text = reply.words + (f" with the coefficient {weights}" if weights else "")
        yield escaped(f"round {reply.round} phase {reply.phase} {reply.kind}: {reply.wrong or text}")
