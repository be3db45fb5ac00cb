"""The fixtures of these tests."""

from tests.fedpareto.cli.scene import centre, finished, stub

__all__ = ["centre", "finished", "stub"]
