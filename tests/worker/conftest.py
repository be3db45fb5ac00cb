"""The fixtures of these tests."""

from tests.worker.scene import coordinator, model, offers, scene

__all__ = ["coordinator", "model", "offers", "scene"]
