"""A made-up next version: a copy of this tree with one more of everything that a later version may add."""

import shutil
import subprocess
import sys
from pathlib import Path

from storage.revisions import FIRST, known_revisions
from tests.paths import OWNERS_CODE, ROOT
from tests.releases.versions import PACKAGES, Version, metadata

NEXT = "0.99.0"
REVISION = f"{FIRST + len(known_revisions()):04}"
_MIGRATION = f"""
import sqlalchemy as sa
from alembic import op

revision = "{REVISION}"
down_revision = "{known_revisions()[-1]}"


def upgrade() -> None:
    with op.batch_alter_table("clients", schema=None) as batch_op:
        batch_op.add_column(sa.Column("town", sa.String(length=8), server_default="x", nullable=False))


def downgrade() -> None:
    with op.batch_alter_table("clients", schema=None) as batch_op:
        batch_op.drop_column("town")
"""
_COLUMN = '    town: Mapped[str] = mapped_column(sa.String(8), server_default="x")\n'
_FIELD = "  // One more field.\n  string town = 99;\n"
_ONE_OF = "{\n  // What is said.\n  oneof message {\n"
STREAMS = ("AttendRequest", "AttendResponse", "SubmitResponse")
_KEY = '    town: str = Field("", description="one more key")\n'
_STATE = '"lambda": shares | dict(zip(rows.clients, moved.tolist(), strict=True))'
_TABLE = '    ("CREATE TABLE towns (entry INTEGER PRIMARY KEY, town TEXT)",),\n'
# What is added behind a text that a file has once.
ADDED = {
    # A column, with its migration.
    "storage/models.py": {"class Client(Base):\n": _COLUMN},
    # A key of the state that a rule keeps between rounds, which is signed.
    "federation/aggregation/rules/afl.py": {
        '    name = "afl"\n': '    added_state = frozenset({"rounds"})\n',
        _STATE: ', "rounds": rows.state.get("rounds", 0) + 1',
    },
    # A field of the messages of both sides, signed and not.
    "proto/federation/v1/federation.proto": {
        "message Hello {\n": _FIELD,
        # And a kind of message in each stream.
        **{f"message {name} {_ONE_OF}": "  " + _FIELD.replace("\n  ", "\n    ") for name in STREAMS},
    },
    "worker/connection/attendance.py": {
        "        yield AttendRequest(hello=hello)\n": '        yield AttendRequest(town="x")\n'
    },
    "coordinator/services/federation.py": {
        "            await self._read(self._offers.tell, [attendance])\n": (
            '            yield messages.AttendResponse(town="x")\n'
        )
    },
    "coordinator/services/reply_calls.py": {
        "                        yield messages.SubmitResponse(window=window)\n": (
            '                        yield messages.SubmitResponse(town="x")\n'
        )
    },
    "proto/federation/v1/common.proto": {
        "message AssignmentManifest {\n": _FIELD,
        "message ReplyManifest {\n": _FIELD,
        "message StepManifest {\n": _FIELD,
    },
    "worker/site/hello.py": {"            software=software(),\n": '            town="x",\n'},
    "federation/work/replies.py": {"        software=software,\n": '        town="x",\n'},
    "coordinator/rounds/fleets/remote.py": {"            kind=work.name,\n": '            town="x",\n'},
    "coordinator/rounds/manifest.py": {"        state_before=state_before,\n": '        town="x",\n'},
    # A kind of work.
    "federation/work/registry.py": {'"residual", "search"': ', "ticket"'},
    # A table of a ledger.
    "worker/ledgers/privacy_ledger.py": {'        """,\n    ),\n': _TABLE},
    # A setting of the coordinator and of a worker, a key of a policy and of a run specification.
    "coordinator/settings.py": {"class Settings(Section):\n": _KEY},
    "worker/config.py": {"class WorkerConfig(Section):\n": _KEY},
    "worker/site/policy_file.py": {"class Policy(Section):\n": _KEY},
    "federation/spec/run_spec.py": {"class RunSpec(Section):\n": _KEY},
    # A fact that a member keeps of a private round that is under way.
    "federation/spec/sharing.py": {'    frozen: tuple[str, ...] = ()\n    buffers: str = ""\n': '    town: str = ""\n'},
}
# The kind of work is that of an owner's package, whose rule here goes on without the members that do not know it.
WITHOUT_SOME = {
    "needed=asked": "needed=1",
    "name: number**2 for name, number in numbers.items()": "one: numbers[one] ** 2 for one in replied",
    "winners = sorted(numbers, key": "winners = sorted(replied, key",
    "        kept = yield": "        replied = [one.client_id for one in squares]\n        kept = yield",
}


def migrations_since(version: Version) -> list[str]:
    """The revisions that this version, or the next one, adds to the only one of 0.1.0."""
    return [*known_revisions()[1:], *([REVISION] if version.name == NEXT else [])]


def next_version(directory: Path) -> Version:
    """Makes the next version in a directory."""
    for package in (*PACKAGES, "proto"):
        shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, added in ADDED.items():
        path = directory / name
        text = path.read_text()
        for before, more in added.items():
            assert text.count(before) == 1, f"{name} has {text.count(before)} times {before!r}"
            text = text.replace(before, before + more)
        path.write_text(text)
    (directory / "storage" / "migrations" / "versions" / f"{REVISION}_one_more_column.py").write_text(_MIGRATION)
    ticket = directory / "federation" / "work" / "ticket"
    ticket.mkdir()
    (ticket / "__init__.py").touch()
    code = (OWNERS_CODE / "lottery" / "lottery.py").read_text()
    for before, after in WITHOUT_SOME.items():
        assert code.count(before) == 1, before
        code = code.replace(before, after)
    (ticket / "wire.py").write_text(code)
    generate = [sys.executable, str(directory / "proto" / "generate.py"), str(directory)]
    subprocess.run(generate, check=True, capture_output=True)
    metadata(directory, NEXT, **{"fedpareto.rules": {"lottery": "federation.work.ticket.wire:Lottery"}})
    return Version(NEXT, directory)
