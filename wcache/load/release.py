"""Which release of transformers an import would take, found without importing it."""

import contextlib
import importlib.metadata
import importlib.util
import re
from pathlib import Path

# Of PEP 440, without development releases (.dev) and local builds (+): those change as they are.
_RELEASE = re.compile(r"[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?(\.post[0-9]+)?")
_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


def released() -> str | None:
    """Its version; None where there is none, or where that does not say what it is: a working copy,
    a build of one, or what an upgrade that was ended has left."""
    try:
        found = importlib.metadata.distribution("transformers")
        spec = importlib.util.find_spec("transformers")
    except (importlib.metadata.PackageNotFoundError, ValueError):  # a module without a spec
        return None
    # Written by installers for what was not found by its version: packaging's "direct URL origin".
    if found.read_text("direct_url.json") or not _RELEASE.fullmatch(found.version or ""):
        return None
    # Another one may go before it on the path, by PYTHONPATH or in the folder of a script.
    own = Path(str(found.locate_file("transformers/__init__.py"))).resolve()
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != own:
        return None
    return found.version if _said_by(own) == found.version else None


def _said_by(module: Path) -> str | None:
    """The version that the package says itself."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if found := _VERSION.search(module.read_text(encoding="utf-8")):
            return found.group(1)
    return None
