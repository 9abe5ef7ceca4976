"""The files that say that a rank is ready: there only while what they say is true."""

import msgspec
import pytest

from tests.cli.views import config, serving
from tests.places import Places
from wcache.daemon.ready import Announcement, Ready
from wcache.paths import RankPaths
from wcache.protocol.reports import GenerationReport

pytestmark = pytest.mark.unit


@pytest.fixture
def paths(places: Places) -> RankPaths:
    made = places.rank()
    made.folder.mkdir(parents=True)
    return made


def generation(number: int) -> GenerationReport:
    found = serving(0, of=config()).serving
    assert found is not None
    return msgspec.structs.replace(found, number=number)


def told(paths: RankPaths) -> int:
    return msgspec.json.decode(paths.ready_file.read_bytes(), type=Ready).generation


def closed(paths: RankPaths) -> None:
    """Nothing can be put in the place of a folder, as nothing can be put on a full disk."""
    paths.fingerprint_file.unlink()
    paths.fingerprint_file.mkdir()


def test_files_that_can_not_be_written_anew_do_not_tell_of_another_generation(
    paths: RankPaths,
) -> None:
    announcement = Announcement(paths)
    announcement.make(generation(1))
    assert told(paths) == 1
    closed(paths)
    announcement.make(generation(2))
    assert str(paths.ready_file) in announcement.problem
    assert not paths.ready_file.exists()
    paths.fingerprint_file.rmdir()
    announcement.make(generation(2))
    assert (told(paths), announcement.problem) == (2, "")


def test_files_that_are_true_stay_when_they_can_not_be_written_again(paths: RankPaths) -> None:
    announcement = Announcement(paths)
    announcement.make(generation(1))
    closed(paths)
    announcement.make(generation(1))
    assert announcement.problem
    assert told(paths) == 1


def test_files_of_a_daemon_before_do_not_stay(paths: RankPaths) -> None:
    Announcement(paths).make(generation(1))
    closed(paths)
    Announcement(paths).make(generation(1))
    assert not paths.ready_file.exists()
