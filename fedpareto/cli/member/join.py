"""`fedpareto worker join`: makes keys, and gets a certificate."""

from pathlib import Path
from typing import Annotated

import typer

from fedpareto.cli.failure import USAGE, answer, failing
from fedpareto.cli.member.member_command import DEFAULT_HOME, HomeOption
from fedpareto.cli.secret_input import (
    STANDARD_INPUT,
    new_passphrase,
    passphrase_for,
    proxies_for,
    read_join_string,
)
from fedpareto.cli.shared_options import (
    AskOption,
    JsonOption,
    PassphraseOption,
    ProxyOption,
)
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from federation.trust.envelope import key_id
    from federation.trust.join_string import JoinStringFields
    from federation.trust.keys import IdentityError
    from worker.config import write_template
    from worker.connection.enroll import EnrollmentError, enroll, join_again
    from worker.home import WorkerHome, WorkerHomeError


def join(
    home: HomeOption = DEFAULT_HOME,
    join_file: Annotated[Path, typer.Option(help="File with the join string; - is standard input.")] = STANDARD_INPUT,
    arguments: Annotated[list[str] | None, typer.Argument(hidden=True, help="Refused, without a secret in it.")] = None,
    passphrase_file: PassphraseOption = None,
    ask_passphrase: AskOption = False,
    proxy: ProxyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Become a member: make keys, get a certificate. Reads the join string from standard input, or asks for it.

    A member whose certificate has ended, or whose TLS key is lost, joins again with its directory, its signing key
    and a new join string for its name.
    """
    with failing(IdentityError, code=USAGE):
        decoded = JoinStringFields.decode(read_join_string(join_file, arguments or []))
    proxies = proxies_for(decoded.addresses, proxy)
    worker_home = WorkerHome(home)
    again = worker_home.joined
    with failing(EnrollmentError, WorkerHomeError, IdentityError, OSError):
        if again:
            with worker_home.lock():
                passphrase = passphrase_for(home / "signing.key", passphrase_file)
                enrolled = join_again(worker_home, decoded, passphrase=passphrase, proxy=proxies)
        else:
            passphrase = new_passphrase(passphrase_file, ask=ask_passphrase)
            enrolled = enroll(worker_home, decoded, passphrase=passphrase, proxy=proxies)
    member, written = enrolled.member, False
    try:
        written = write_template(worker_home.config, proxy=_as_written(proxy))
    except OSError as error:  # the membership stands, and the worker runs without the file
        typer.echo(f"warning: {worker_home.config} cannot be written ({error.strerror})", err=True)
    document = {
        "federation_id": member.federation_id,
        "client_id": member.client_id,
        "addresses": member.addresses,
        "home": str(home),
        "certificate_expires": member.not_after.isoformat(),
        "approval_pending": enrolled.approval_pending,
        "key_id": (key := key_id(member.signing_key.public_key()).hex()),
    }
    approval = (
        "It waits: a security officer of the federation (role security-officer) must approve it before it gets work. "
        f"Say that you have joined (fedpareto admin approve {member.client_id}), and tell the officer the fingerprint "
        f"of its key, by telephone or in person: {key}"
    )
    answer(
        as_json,
        document,
        f"{member.client_id} is a member of {member.federation_id}; keys and certificate are in {home}",
        *([approval] if enrolled.approval_pending else []),
        f"Next: fedpareto worker run --home {home} --task NAME --data DIR"
        + (f" --set proxy={proxy}" if proxy and not written else ""),
        *([f"Or write task and data into {worker_home.config}"] if written else []),
    )


def _as_written(proxy: str | None) -> str | None:
    """The proxy as worker.toml names it: a file by its whole path."""
    return f"@{Path(proxy[1:]).absolute()}" if proxy and proxy.startswith("@") else proxy
