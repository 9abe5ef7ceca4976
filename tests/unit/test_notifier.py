"""What a daemon says while its supervisor's socket is not there."""

import pytest

from tests.places import Places
from tests.processes import Store
from wcache.notify import Notifier

pytestmark = pytest.mark.unit


def test_ready_that_nobody_heard_is_said_again_once_somebody_listens(places: Places) -> None:
    path = places.root / "notify"
    notifier = Notifier(str(path), None)
    assert not notifier.say("READY=1")
    assert not notifier.mention("STATUS=alone")
    store = Store(path)
    try:
        assert notifier.mention("STATUS=heard")
        assert notifier.mention("STATUS=once")
        store.serve(lambda: "STATUS=once" in store.said)
        assert store.said == ["STATUS=heard", "READY=1", "STATUS=once"]
    finally:
        store.close()
