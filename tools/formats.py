"""Every format that this project writes, with the versions that the code has; `tables` writes them into a page."""

from typing import NamedTuple

from coordinator.backups.inventory import Content
from federation.record import bundle
from federation.text_files import FORMAT
from federation.training.pipe import PROTOCOL
from federation.trust.envelope import CONTEXTS
from federation.trust.join_string import PREFIX
from federation.v1 import federation_pb2
from storage.revisions import known_revisions
from worker.ledgers import left_ledger, privacy_ledger, round_ledger
from worker.site import run_requests
from worker.work import memory


class Format(NamedTuple):
    """A row: what is written, its version, who writes and who reads it, and what an older reader does with a newer one.

    `version` is empty where there is none; `older` then begins with the reason.
    """

    name: str
    version: str
    writer: str
    reader: str
    older: str


_REFUSED = "refuses it, and names both formats"
_KEYS = f"{_REFUSED}; in the same format, it refuses a key that it does not know, and names it"
_STATE = f"{_REFUSED}; in the same format, it drops a key that it does not know"
_LEDGER = "refuses a file of a newer version, and leaves it as it is"
_MESSAGES = "no version: the file holds messages of the wire contract"
_TEXT = "no version: the content is a standard format"


def _ledger(name: str, migrations: tuple[object, ...], holds: str) -> Format:
    return Format(f"`{name}`: {holds}", f"{len(migrations)}", "worker", "worker, `fedpareto worker`", _LEDGER)


def formats() -> tuple[Format, ...]:
    """All formats."""
    labels = sorted({"/".join(context.decode().split("/")[:2]) for context in CONTEXTS.values()})
    one = f"{FORMAT}"
    return (
        Format(
            "Wire contract",
            f"`{federation_pb2.DESCRIPTOR.package}`",
            "all",
            "all",
            "ignores fields that it does not know; an unknown kind of work is declined with the reason `work`",
        ),
        Format("Labels of signatures", f"`{labels[0]}`", "all", "all", "rejects a signature with another label"),
        Format(
            "Join string",
            f"`{PREFIX}`",
            "coordinator",
            "`worker join`, `admin join`",
            "refuses it, and names the beginning that it reads",
        ),
        Format("Bundle of a run", f"{bundle.FORMAT}", "`admin bundle`", "`verify`", _REFUSED),
        Format(
            "Backup",
            f"{Content.model_fields['format'].default}",
            "`coordinator backup`",
            "`coordinator restore`",
            "refuses the inventory, and names the key",
        ),
        Format(
            "Database",
            f"`{known_revisions()[-1].partition('.')[0]}`",
            "coordinator",
            "coordinator",
            "refuses it, with both revisions; a backup of the older version can be restored",
        ),
        Format(
            "JSON in columns of the database, and the state of an algorithm in the signed step",
            "",
            "coordinator",
            "coordinator, `verify`",
            "no version: the database's revision counts; keys are added with a default, so that a newer version reads "
            "what an older one signed",
        ),
        Format(
            "Run specification",
            "",
            "administrator",
            "coordinator, worker, `simulate`",
            "no version: it refuses a key that it does not know, and names it. A new key has as default what the "
            "version before did",
        ),
        Format("`coordinator.toml`", one, "`coordinator init`, operator", "coordinator", _KEYS),
        Format("`worker.toml`", one, "`worker join`, owner", "worker", _KEYS),
        Format("`policy.toml`", one, "owner", "worker", _KEYS),
        Format("`roster.toml`", one, "`worker roster`, owner", "worker", _KEYS),
        Format(
            "`member.toml`",
            one,
            "`worker join`, `admin join`",
            "worker, `admin`",
            f"{_REFUSED}; in the same format, it ignores and keeps a key that it does not know",
        ),
        Format("`notify.toml`", one, "administrator", "`admin notify`", _KEYS),
        Format(
            "`notify/*.json` beside it",
            one,
            "`admin notify`",
            "`admin notify`",
            f"{_REFUSED}. Removed, its receiver is told again of the alerts that last",
        ),
        _ledger("privacy.db", privacy_ledger.MIGRATIONS, "the privacy that was spent"),
        _ledger("private-rounds.db", round_ledger.MIGRATIONS, "the private rounds that count"),
        _ledger("memory.db", memory.MIGRATIONS, "the private rounds under way"),
        _ledger("left.db", left_ledger.MIGRATIONS, "what left the site"),
        _ledger("runs.db", run_requests.MIGRATIONS, "the runs that asked, and the owner's decisions"),
        Format("`progress.json`, `log.json`, `begun.json`", one, "worker", "worker", _STATE),
        Format(
            "`pause.json`", one, "`worker pause`", "worker, `worker status`", f"{_STATE}. The site counts as paused"
        ),
        Format(
            "`leave.json`, `withdrawal.json`",
            one,
            "`worker leave`, worker",
            "worker, `worker status`, `worker verify`",
            f"{_STATE}. With a `leave.json` that cannot be read, the site begins no work and does not leave",
        ),
        Format(
            "`starts.json`",
            one,
            "worker",
            "worker, `worker copied`",
            f"{_STATE}. Moved away, the coordinator refuses the home until `worker copied --this-one`",
        ),
        Format("`status.json`", one, "worker", "`worker status`", _REFUSED),
        Format("`rotating.json`", one, "`worker rotate-key`", "`worker rotate-key`", _REFUSED),
        Format(
            "`receipts.jsonl`",
            "",
            "worker",
            "`worker verify`, other members",
            "no version: the facts are in signed messages, and other keys are ignored",
        ),
        Format("`spool/`, `handed-in/`, `evidence/`", "", "worker", "worker", _MESSAGES),
        Format(
            "`kept/`, `cache/`, models and updates",
            "",
            "worker, coordinator",
            "all",
            f"{_TEXT}, safetensors; tensors are compared by name and shape",
        ),
        Format(
            "Keys and certificates; `rotations` of keys",
            "",
            "all",
            "all",
            f"{_TEXT}: PEM, and one signed message in each line of the rotations",
        ),
        Format(
            "`ports.json`, `kept-ports.json`, `log-forked.json`, `pending.txt`, `joining.key`, `restore-accepted`, "
            "`start-decided`",
            "",
            "coordinator, worker",
            "the same program, people",
            "no version: each is written anew by the version that needs it",
        ),
        Format(
            "Messages of an external trainer",
            f"{PROTOCOL}",
            "worker",
            "the owner's program",
            "an owner's program compares it; the worker refuses a message that it does not know",
        ),
        Format(
            "`runs.jsonl` of an experiment",
            "",
            "`experiment run`",
            "`experiment`",
            "no version: a line has the digest of its specification, and other keys are ignored",
        ),
        Format(
            "Output of `--json`",
            "",
            "all commands",
            "scripts",
            "no version: keys are added, and none is removed or gets another meaning; a script ignores other keys",
        ),
    )
