"""What ``doctor`` finds: one line each, and the command that mends it. Pure."""

from typing import Literal

import msgspec

from wcache.errors import ExitCode

Result = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One row of ``doctor``."""

    check: str
    """One word or two; the same for all findings of a check."""
    result: Result
    """``warn`` works now and may cost weights or time later; ``fail`` does not work."""
    detail: str
    mend: str = ""
    """A command, or what to do where there is no command for it."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of ``doctor --json``."""

    version: int = 1
    """Of this document. A field may be added without a new one."""
    wcache: str
    instance: str
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> ExitCode:
        failed = any(finding.result == "fail" for finding in self.findings)
        return ExitCode.FAILED if failed else ExitCode.DONE


def ok(check: str, detail: str) -> Finding:
    return Finding(check=check, result="ok", detail=detail)


def warn(check: str, detail: str, mend: str) -> Finding:
    return Finding(check=check, result="warn", detail=detail, mend=mend)


def fail(check: str, detail: str, mend: str) -> Finding:
    return Finding(check=check, result="fail", detail=detail, mend=mend)
