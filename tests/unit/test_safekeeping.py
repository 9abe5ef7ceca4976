"""What a daemon has its supervisor keep is handed over again when nobody listened."""

import pytest

from tests.places import Places, publish_config
from tests.processes import Store
from wcache.daemon import safekeeping
from wcache.daemon.configuration import STORED_NAME, Configuration
from wcache.daemon.safekeeping import Safekeeping
from wcache.notify import Notifier

pytestmark = pytest.mark.unit


def test_a_configuration_that_nobody_heard_of_is_stored_later_and_once(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = places.root / "notify"
    configuration = Configuration(places.write_config(publish_config()), None)
    notifier = Notifier(str(path), None)
    keeping = Safekeeping(notifier)
    monkeypatch.setattr(safekeeping, "AGAIN_S", 0.0)
    keeping.keep_config(configuration)
    store = Store(path)
    try:
        for _ in range(3):
            keeping.keep_lost_config(configuration)
        notifier.say("STATUS=end")
        store.serve(lambda: "STATUS=end" in store.said)
        assert STORED_NAME in store.fds
        assert store.said.count("FDSTORE=1") == 1
    finally:
        store.close()
