"""Fixtures of the tests with real processes."""

from tests.process.supervised import supervised

__all__ = ["supervised"]
