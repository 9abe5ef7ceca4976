"""The direct supervisor as commands meet it: launched when needed, gone when not."""

import os
import socket

import pytest

from tests.places import publish_config
from tests.process.supervised import Supervised
from tests.processes import PATIENCE_S, wait_for
from tests.users import without_privileges
from wcache.config import LayoutSection
from wcache.errors import ExitCode, NoPermissionError, WcacheError
from wcache.paths import InstancePaths
from wcache.protocol.messages import MAX_FRAME_BYTES
from wcache.supervise import supervisor_for
from wcache.supervise.direct.client import DirectSupervisor
from wcache.supervise.interface import UnitReport

pytestmark = pytest.mark.process


def test_the_first_start_launches_a_supervisor_in_the_background(supervised: Supervised) -> None:
    assert supervised.show() == UnitReport(rank=0)
    unit = supervised.up()
    assert unit.state == "active"
    parent = supervised.starts()[0]["parent"]
    assert os.getsid(parent) != os.getsid(0)
    assert os.getppid() != parent
    supervised.commands.start([0, 1])
    assert supervised.wait_active(1).state == "active"
    assert supervised.starts(1)[0]["parent"] == parent
    supervised.commands.shutdown()
    assert supervised.show() == UnitReport(rank=0)


def test_a_background_supervisor_ends_when_nothing_is_left_to_keep(
    supervised: Supervised,
) -> None:
    supervised.timing(idle_s=0.2)
    supervised.up()
    paths = InstancePaths.of("")
    supervised.commands.stop([0])
    wait_for(lambda: not paths.supervisor_socket.exists(), "the supervisor has ended")
    # And the next command has a new one.
    supervised.up()
    supervised.commands.shutdown()


def test_a_supervisor_that_can_not_start_says_why(supervised: Supervised) -> None:
    folder = InstancePaths.of("").supervisor_folder
    (folder / "lock").mkdir(parents=True)
    with pytest.raises(WcacheError, match=r"supervisor did not start: can not begin: .*lock"):
        supervised.commands.start([0])
    (folder / "lock").rmdir()
    folder.rmdir()
    folder.write_text("in the way")
    with pytest.raises(WcacheError, match=r"supervisor can not be reached: .*Not a directory"):
        supervised.commands.start([0])


def test_a_log_of_somebody_else_is_no_permission(supervised: Supervised) -> None:
    log = InstancePaths.of("").supervisor_log
    log.parent.mkdir(parents=True)
    log.touch(mode=0o400)
    supervised.places.root.chmod(0o755)
    with without_privileges(), pytest.raises(NoPermissionError) as caught:
        supervised.commands.start([0])
    assert caught.value.message == f"no permission to write {log}"
    assert "WCACHE_STATE_DIR" in caught.value.hint


def test_a_log_that_can_not_be_written_is_named(supervised: Supervised) -> None:
    log = InstancePaths.of("").supervisor_log
    log.mkdir(parents=True)
    with pytest.raises(WcacheError) as caught:
        supervised.commands.start([0])
    assert caught.value.message == f"{log} can not be written: is a directory"
    log.rmdir()
    log = InstancePaths.of("").log_file(0, "daemon")
    log.mkdir()
    with pytest.raises(WcacheError, match=f"{log} can not be written: is a directory"):
        supervised.commands.start([0])


def test_stop_and_shutdown_without_a_supervisor_do_nothing(supervised: Supervised) -> None:
    supervised.commands.stop([0, 1])
    supervised.commands.shutdown()
    assert not InstancePaths.of("").supervisor_folder.exists()


def test_commands_that_come_together_launch_one_supervisor(supervised: Supervised) -> None:
    children = []
    for rank in (0, 1):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                supervised.commands.start([rank])
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    supervised.wait_active(0)
    supervised.wait_active(1)
    assert supervised.starts(0)[0]["parent"] == supervised.starts(1)[0]["parent"]
    supervised.commands.shutdown()


def test_in_the_foreground_the_configured_ranks_are_started(supervised: Supervised) -> None:
    supervised.places.write_config(publish_config(layout=LayoutSection(tp=2)))
    supervised.launch()
    assert supervised.wait_active(0).state == "active"
    assert supervised.wait_active(1).state == "active"


def test_in_the_foreground_an_absent_configuration_is_said(supervised: Supervised) -> None:
    supervised.launch()
    config = supervised.places.instance().config_file
    assert f"{config} is not there: no rank is started" in supervised.log()
    supervised.launch("other", "--empty")
    assert supervised.log().count("is not there") == 1
    supervised.launch("draft")
    assert "until wcache up --instance draft --model …" in supervised.log()


def test_a_configuration_that_can_not_be_read_ends_it_with_that_code(
    supervised: Supervised,
) -> None:
    config = supervised.places.instance().config_file
    config.parent.mkdir(parents=True)
    config.write_text("[model]\npath = 1\n")
    with pytest.raises(AssertionError, match=r"model\.path: expected `str`"):
        supervised.launch()
    assert supervised.exit_code() == ExitCode.CONFIGURATION


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
        (2).to_bytes(4, "big") + b"[]",
        (40).to_bytes(4, "big") + b'{"type": "start", "ranks": [-1]}        ',
        (4).to_bytes(4, "big") + b"ha",
        b"",
    ],
    ids=["http", "too long", "no message", "no rank", "half a frame", "nothing"],
)
def test_garbage_on_the_control_socket_ends_that_connection_only(
    supervised: Supervised, said: bytes
) -> None:
    supervised.launch("--empty")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(PATIENCE_S)
        peer.connect(str(InstancePaths.of("").supervisor_socket))
        peer.sendall(said)
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(4096):
            pass
    supervised.up()


def test_the_control_socket_is_for_its_owner_only(supervised: Supervised) -> None:
    supervised.launch("--empty")
    paths = InstancePaths.of("")
    assert paths.supervisor_socket.stat().st_mode & 0o777 == 0o600
    assert paths.supervisor_folder.stat().st_mode & 0o777 == 0o700


def test_this_machine_has_the_direct_supervisor() -> None:
    assert isinstance(supervisor_for("draft"), DirectSupervisor)
