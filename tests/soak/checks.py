"""The checks after a run: whatever went wrong meanwhile, this must hold of the record."""

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from federation.digests import digest
from federation.trust.certificates import fingerprint, load_certificate
from federation.trust.member_files import MemberFiles
from fedpareto.processes.process_federation import ProcessError
from tests.soak.cluster import Cluster, Coordinator
from worker.receipts import Receipt, ReceiptsError, read_receipts

Place = tuple[int, int, str]  # the number of a round, that of a phase in it, and a client
_COUNTED = """
select r.number, p.number, a.client_id, a.state, count(u.reply_id) from assignments a
join phases p using (phase_id) join rounds r using (round_id)
left join replies u on u.assignment_id = a.assignment_id and u.accepted
where r.run_id = :run group by a.assignment_id, r.number, p.number, a.client_id, a.state
"""
_QUESTIONS = """
select r.number, p.number, a.client_id, a.envelope from assignments a
join phases p using (phase_id) join rounds r using (round_id) where r.run_id = :run
"""


@dataclass(frozen=True)
class Calm:
    """A run with which nothing interfered: the digest of its model, and each question with its end.

    The end is the state of the assignment, and the number of its accepted replies.
    """

    model: str
    ends: Mapping[Place, tuple[str, int]]

    @classmethod
    def of(cls, cluster: Cluster, run: str) -> "Calm":
        """Waits until the run is completed."""
        return cls(cluster.wait_completed(run), ends(cluster, run))


def ends(cluster: Cluster, run: str) -> Mapping[Place, tuple[str, int]]:
    """The ends of the questions of a run, by their places."""
    rows = cluster.query(_COUNTED, run=run)
    found = {(number, phase, client): (state, accepted) for number, phase, client, state, accepted in rows}
    assert len(found) == len(rows), "two questions at one place"
    return found


def questions(cluster: Cluster, run: str) -> Mapping[Place, str]:
    """The digest of each signed question that is on record, by its place; none while PostgreSQL is away."""
    rows = cluster.glance(_QUESTIONS, run=run) or []
    return {(number, phase, client): digest(bytes(sent)) for number, phase, client, sent in rows}


class Checks:
    """Checks runs of a cluster; receipts that were read are not read again."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._read: Counter[str] = Counter()  # characters of each member's receipts
        self._ca = fingerprint(load_certificate((cluster.first.home / "ca.pem").read_bytes()))
        self.receipts = 0

    def of_run(self, run: str, calm: Calm, asked: Mapping[Place, str], by: Coordinator) -> list[str]:
        """What is wrong with a run that has ended.

        Args:
            run: its id.
            calm: a run of the same specification.
            asked: the questions that were on record before a fault; they must be there still.
            by: the coordinator that gives the bundle and verifies the log.
        """
        state, reason = self._cluster.state(run)
        if state != "COMPLETED":
            return [f"the run is {state}: {reason}"]
        found = [*self._of_model(run, calm), *self._of_ends(run, calm), *self._of_questions(run, asked)]
        return [*found, *self._of_receipts(), *self._of_bundle(run, by), *self.of_log(by)]

    def of_log(self, by: Coordinator) -> Iterator[str]:
        """The audit log verifies, and the record agrees with it."""
        try:
            by.fedpareto("admin", "audit", "verify", "--home", str(by.home / "admin"))
        except ProcessError as error:
            yield f"admin audit verify: {error}"

    def _of_model(self, run: str, calm: Calm) -> Iterator[str]:
        """The model is that of the calm run."""
        model = self._cluster.query("select model from runs where run_id = :run", run=run)[0][0]
        if model != calm.model:
            yield f"the model is {model}; that of the calm run is {calm.model}"

    def _of_ends(self, run: str, calm: Calm) -> Iterator[str]:
        """Every member was asked as in the calm run, and no reply was lost or counted twice."""
        now = ends(self._cluster, run)
        for place in sorted({*now, *calm.ends}):
            if now.get(place) != calm.ends.get(place):
                yield f"{place}: {now.get(place)}, and in the calm run {calm.ends.get(place)}"

    def _of_questions(self, run: str, asked: Mapping[Place, str]) -> Iterator[str]:
        """Every question that was on record is still there as it was signed."""
        now = questions(self._cluster, run)
        yield from (
            f"another question is on record for {place}" for place, sent in asked.items() if now.get(place) != sent
        )

    def _of_receipts(self) -> Iterator[str]:
        """Each receipt that a member has got since the last check is on record, with its reply."""
        for client in self._cluster.workers:
            try:
                receipts = self._new_receipts(client)
            except ReceiptsError as error:
                yield f"{client}: {error}"
                continue
            for receipt in receipts:
                self.receipts += 1
                rows = self._cluster.query(
                    "select accepted, receipt from replies where envelope_digest = :reply", reply=receipt.reply
                )
                if [(row.accepted, digest(bytes(row.receipt))) for row in rows] != [
                    (receipt.accepted, receipt.receipt)
                ]:
                    yield f"{client}, {receipt.assignment_id}: {len(rows)} replies are on record for its receipt"

    def _new_receipts(self, client: str) -> list[Receipt]:
        home = self._cluster.directory / client
        text = (home / "receipts.jsonl").read_text()
        new = text[self._read[client] : text.rfind("\n") + 1]
        self._read[client] += len(new)
        with tempfile.TemporaryDirectory() as directory:
            (path := Path(directory, "receipts.jsonl")).write_text(new)
            return read_receipts(path, MemberFiles.load(home).coordinator.chain)

    def _of_bundle(self, run: str, by: Coordinator) -> Iterator[str]:
        """The record of the run verifies, for somebody who has nothing but the file and the CA's fingerprint."""
        path = self._cluster.directory / "bundle.fedpareto"
        try:
            home = str(by.home / "admin")
            by.fedpareto("admin", "bundle", run, "--out", str(path), "--payloads", "--yes", "--force", "--home", home)
            by.fedpareto("verify", str(path), "--ca", self._ca)
        except ProcessError as error:
            yield f"the bundle of coordinator {by.name}: {error}"
        finally:
            path.unlink(missing_ok=True)
