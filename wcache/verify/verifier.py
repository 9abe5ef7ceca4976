"""Verifies ranks of one instance, as deep as is asked for."""

from collections.abc import Iterator

from wcache.config import Config
from wcache.errors import ManifestError, OutOfMemoryError, ProtocolError
from wcache.manifest import Manifest
from wcache.paths import RankPaths
from wcache.verify import quick
from wcache.verify.held import Held, held, mapped
from wcache.verify.result import Depth, Progress, Result


class Verifier:
    """Files on disk are looked at once for all ranks."""

    def __init__(self, config: Config | None) -> None:
        """Without a ``config`` the weights are compared with what they say of themselves."""
        self._config = config
        self._files = quick.Files(config)

    def verify(self, paths: RankPaths, *, depth: Depth, progress: Progress) -> Iterator[Result]:
        """Yields the result of each check.

        Raises :class:`wcache.errors.NotReadyError` when the rank has no weights, and
        :class:`wcache.errors.NoSuchRankError` when it has no daemon.
        """
        rank = paths.id.rank
        with held(paths) as one:
            try:
                manifest = one.manifest()
            except (ManifestError, ProtocolError) as error:
                yield Result(rank=rank, check="manifest", result="bad", detail=error.message)
                return
            yield quick.manifest(rank, one, manifest)
            descriptors = quick.descriptors(rank, one)
            yield descriptors
            if self._config is not None:
                yield quick.configuration(rank, manifest, self._config)
            if manifest.checkpoint:
                yield self._files.check(rank, manifest)
            # What is no slab can not be mapped, so nothing can be said of its content.
            if depth == "quick" or descriptors.result != "ok":
                return
            try:
                yield from self._content(paths, one, manifest, depth, progress)
            except OutOfMemoryError as error:
                hint = f"; {error.hint}" if error.hint else ""
                yield Result(
                    rank=rank, check="digests", result="skipped", detail=error.message + hint
                )
                return
        if depth == "parity":
            from wcache.verify.logits import logits

            yield logits(paths.id, manifest, self._files.folder(manifest), progress)

    def _content(
        self, paths: RankPaths, one: Held, manifest: Manifest, depth: Depth, progress: Progress
    ) -> Iterator[Result]:
        from wcache.verify.digests import damaged, digests_result
        from wcache.verify.parity import parity
        from wcache.verify.repair import repair

        rank, folder = paths.id.rank, self._files.folder(manifest)
        with mapped(one) as content:
            bad = damaged(manifest, content, progress)
            if depth == "repair":
                yield from repair(paths, one, manifest, content, bad, folder, progress)
                return
            yield digests_result(rank, manifest, bad)
            if depth == "parity":
                yield from parity(rank, manifest, content, self._config, folder, progress)
