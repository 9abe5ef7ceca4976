"""Fixtures of the tests of whole commands."""

from tests.cli.node import node

__all__ = ["node"]
