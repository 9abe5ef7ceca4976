"""What the daemon goes by where file and stored configuration are of another wcache."""

import msgspec
import pytest

from tests.places import Places, publish_config
from wcache.config import AccessSection
from wcache.daemon.configuration import Configuration
from wcache.memory.memfd import create_sealed

pytestmark = pytest.mark.unit

ACCESS = AccessSection(uids=(4242,), publishers=(4243,))


def stored(**changes: object) -> int:
    """The descriptor of a configuration that a daemon with other keys has stored."""
    said = msgspec.to_builtins(publish_config(access=ACCESS))
    said["memory"]["numa"] = True
    return create_sealed("config", msgspec.json.encode(said | changes))


def test_who_may_attach_is_kept_where_a_later_wcache_has_more_keys(places: Places) -> None:
    path = places.write_config(publish_config())
    path.write_text(path.read_text().replace("[memory]", "[memory]\nnuma = true"))
    configuration = Configuration(path, stored(later={"a": 1}))
    assert configuration.problems == (f"{path}: memory.numa: unknown key",)
    # In doubt it is not said what is wanted, and nobody loses a right.
    assert (configuration.current, configuration.wanted(0)) == (None, None)
    assert configuration.access == ACCESS


def test_the_file_has_the_last_word_on_who_may_attach(places: Places) -> None:
    path = places.write_config(publish_config())
    assert Configuration(path, stored()).access == AccessSection()


@pytest.mark.parametrize("access", [{"uids": "all"}, {"uids": [1], "everybody": True}, 3])
def test_an_access_that_is_not_understood_lets_nobody_in(places: Places, access: object) -> None:
    absent = places.root / "none.toml"
    assert Configuration(absent, stored(access=access)).access == AccessSection()


def test_nobody_is_let_in_without_a_configuration(places: Places) -> None:
    absent = places.root / "none.toml"
    assert Configuration(absent, None).access == AccessSection()
    broken = create_sealed("config", b"{")
    assert Configuration(absent, broken).access == AccessSection()
