"""One field in which held weights are not those that are wanted."""

import re

import msgspec

_DIGEST = re.compile(r"(sha256:[0-9a-f]{12})[0-9a-f]{52}")


class Difference(msgspec.Struct, frozen=True):
    """A field of a fingerprint and its two values, as they are told."""

    field: str
    cached: str
    wanted: str

    def __str__(self) -> str:
        return f"{self.field}: cached {self.cached}, wanted {self.wanted}"


def brief(difference: Difference) -> str:
    """A difference with its digests cut to what tells them apart at a glance."""
    return _DIGEST.sub(r"\1…", str(difference))
