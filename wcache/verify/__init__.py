"""Answers "are these bytes the right bytes" for a rank: its descriptors, its files, its content."""

from wcache.verify.result import Depth, Result, Verification
from wcache.verify.verifier import Verifier

__all__ = ["Depth", "Result", "Verification", "Verifier"]
