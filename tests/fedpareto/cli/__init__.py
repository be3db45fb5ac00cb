"""Tests of fedpareto/cli."""
