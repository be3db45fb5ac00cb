"""A worker in a thread, against a scripted coordinator."""

import io
import json
import random
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from federation.training.trainer import Trainer
from federation.trust.member_files import MemberFiles
from tests.harness import wait_for
from tests.scripted import files_in
from worker.events import Events
from worker.home import WorkerHome
from worker.service import Worker
from worker.site.policy import Policy
from worker.work.attacker import Attacker


class Running:
    """A worker in a thread."""

    def __init__(
        self,
        home: WorkerHome,
        member: MemberFiles,
        offers: dict[str, Trainer],
        attacker: Attacker | None = None,
        policy: Policy | None = None,
        uniform: Callable[[float, float], float] | None = None,
        passphrase: bytes | None = None,
    ) -> None:
        home.directory.mkdir(exist_ok=True)
        self.out = io.StringIO()
        self.home = home
        self.member = member
        self.failure: Exception | None = None
        self.worker = Worker(
            home=home,
            member=member,
            offers=offers,
            device="cpu",
            events=Events(self.out),
            uniform=uniform or random.Random(0).uniform,
            attacker=attacker,
            policy=policy or Policy.load(home.policy),
            passphrase=passphrase,
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.worker.run()
        except Exception as error:
            self.failure = error

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.out.getvalue().splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if line["event"] == name]

    def wait_for(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        def there() -> list[dict[str, Any]] | None:
            found = self.events(name)
            return found if len(found) >= count else None

        try:
            return wait_for(there, f"event {name}", 60)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.out.getvalue()} {self.failure!r}") from None

    def spooled(self) -> list[str]:
        return files_in(self.home.spool)

    def stop(self) -> None:
        self.worker.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()


@contextmanager
def files_of_at_most(count: int) -> Iterator[None]:
    """No file of this process may grow beyond a number of bytes: the kernel refuses it as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
