"""The main job as an operator does it: up, status, restart, verify, down, with real processes."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import msgspec
import pytest

from tests.checkpoints import llama_tensors, write_checkpoint, write_llama
from tests.cli.node import PATIENCE_S, SMALL, Node, wait_for
from tests.cli.snapshot import check, environment, wcache
from wcache.config import load_config
from wcache.protocol.wire import peer_credentials
from wcache.ranks import ask

pytestmark = [pytest.mark.cli, pytest.mark.process]

_HOLDING = """
import sys
from wcache.protocol.control import Control
from wcache.paths import RankId, RankPaths
from wcache.protocol.messages import Attach, Attached
with Control.connect(RankPaths.of(RankId("", 0)), "client") as control:
    control.request(Attach(), Attached)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_up_status_verify_and_down_say_what_they_did(node: Node) -> None:
    # Quiet: which phases of a load are seen depends on when one looks.
    check(node.up("--quiet"), "job_up", node.root)
    check(node("status"), "job_status", node.root)
    check(node("verify"), "job_verify", node.root)
    check(node("verify", "--quick", "--json"), "job_verify_quick_json", node.root)
    check(node.up(), "job_up_again", node.root)
    check(node("restart"), "job_restart", node.root)
    check(node("down"), "job_down", node.root)
    check(node("status"), "job_status_down", node.root)


def test_up_writes_what_a_reboot_needs(node: Node) -> None:
    assert node.up().code == 0
    config = load_config(node.paths.config_file)
    assert config.model.path == str(node.model)
    assert (config.model.content or "").startswith("sha256:")
    assert node("down").code == 0
    assert node("up").code == 0
    assert node.report().state == "ready"


def test_a_second_up_touches_nothing(node: Node) -> None:
    assert node.up().code == 0
    before, written = node.report(), node.paths.config_file.stat().st_mtime_ns
    assert node.up().code == 0
    after = node.report()
    assert after.pid == before.pid
    assert after.generations == before.generations
    assert node.paths.config_file.stat().st_mtime_ns == written


# Run as every interpreter starts; to look for a module, without its import, is no such event.
FORBIDDEN = """
import sys
def check(event, arguments):
    if event == "import" and arguments[0] == "transformers":
        raise AssertionError("asked")
sys.addaudithook(check)
"""


def test_a_load_of_a_known_architecture_asks_transformers_nothing(node: Node) -> None:
    """Not the command and not the loaders: it takes each of them seconds of imports."""
    pytest.importorskip("transformers")
    assert node.up("--tp", "3").code == 0
    assert node("down").code == 0
    forbidden = node.root / "forbidden"
    forbidden.mkdir()
    (forbidden / "sitecustomize.py").write_text(FORBIDDEN)
    path = os.pathsep.join([str(forbidden), os.environ.get("PYTHONPATH", "")])
    up = ("up", "--model", str(node.model), *SMALL, "--tp", "3")
    done = wcache(node.places, *up, extra={"PYTHONPATH": path})
    assert (done.code, node.report(2).state) == (0, "ready")
    assert node("down").code == 0
    shutil.rmtree(node.paths.architecture_folder)
    assert wcache(node.places, *up, extra={"PYTHONPATH": path}).code != 0


def test_what_is_kept_where_others_may_write_is_a_warning_and_is_said_once(node: Node) -> None:
    pytest.importorskip("transformers")
    folder = node.paths.architecture_folder
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    done = node.up("--tp", "3")
    said = [line for line in done.stderr.splitlines() if str(folder) in line]
    assert (done.code, len(said)) == (0, 1)
    assert said[0].startswith(f"warning: {folder} is open to others (mode 777): ")
    assert done.stderr.count("asking transformers") == 1


def test_restart_keeps_the_weights_and_says_so(node: Node) -> None:
    assert node.up().code == 0
    before = node.report()
    done = node("restart", "0")
    after = node.report()
    assert done.code == 0
    assert "adopted generation 1" in done.stderr
    assert after.pid != before.pid
    assert before.serving is not None
    assert after.serving is not None
    assert after.serving.manifest_digest == before.serving.manifest_digest
    assert after.serving.how == "adopted"


def test_restart_says_which_ranks_were_not_up_and_leaves_them_down(node: Node) -> None:
    assert node.up("--dp", "2").code == 0
    assert node("down", "1").code == 0
    done = node("restart", "--quiet")
    assert done.code == 0
    assert done.stderr == "warning: rank 1 is not up and left so: wcache up starts it\n"
    assert node.report().serving is not None
    assert ask(node.paths.rank(1)) is None
    assert node.up("--dp", "2").code == 0
    assert "warning" not in node("restart").stderr


def test_a_killed_daemon_is_back_with_its_weights(node: Node) -> None:
    assert node.up().code == 0
    before = node.report()
    os.kill(before.pid, signal.SIGKILL)

    def is_back() -> bool:
        found = ask(node.paths.rank(0))
        return found is not None and found.pid != before.pid and found.serving is not None

    wait_for(is_back, "a new daemon that serves")
    status = node.status()
    assert status["ready"]
    assert status["ranks"][0]["how"] == "adopted"
    assert status["ranks"][0]["restarts"] == 1
    assert node("verify").code == 0


def test_another_model_is_refused_while_an_engine_uses_the_old_one(node: Node) -> None:
    assert node.up().code == 0
    config = node.paths.config_file.read_bytes()
    other = write_checkpoint(node.root / "other", llama_tensors(seed=1))
    with node.lease() as attached:
        done = node("up", "--model", str(other), *SMALL)
        assert done.code == 1
        assert f"pid {os.getpid()}" in done.stderr
        assert "content: cached" in done.stderr
        assert node.paths.config_file.read_bytes() == config
        held = node.report()
        assert [one.manifest_digest for one in held.generations] == [attached.manifest_digest]
        assert held.differences == ()
    assert node("up", "--model", str(other), *SMALL).code == 0
    assert node.status()["ranks"][0]["generation"] == 2
    assert node("verify").code == 0


def test_other_weights_are_not_ordered_while_a_daemon_can_not_be_asked(node: Node) -> None:
    """It may have engines, and the configuration would be that of weights that none of them has."""
    assert node.up().code == 0
    config, daemon = node.paths.config_file.read_bytes(), node.report().pid
    other = write_checkpoint(node.root / "other", llama_tensors(seed=1))
    os.kill(daemon, signal.SIGSTOP)
    try:
        node.paths.rank(0).socket.unlink()  # as it is between a crash and the next daemon
        refused = node("up", "--model", str(other), *SMALL)
    finally:
        os.kill(daemon, signal.SIGCONT)
    assert refused.code == 75
    assert "rank 0 can not be asked what is held: the daemon does not listen" in refused.stderr
    assert node.paths.config_file.read_bytes() == config
    wait_for(lambda: ask(node.paths.rank(0)) is not None, "the daemon listens again")
    assert node("up", "--model", str(other), *SMALL).code == 0


def test_down_is_refused_while_an_engine_uses_the_weights(node: Node) -> None:
    assert node.up().code == 0
    with node.lease():
        assert node("status").stdout.count(f" {os.getpid()} ") == 1
        done = node("down")
        assert done.code == 1
        assert f"pid {os.getpid()}" in done.stderr
        assert "--force" in done.stderr
        assert node.report().state == "ready"
        forced = node("down", "--force")
        assert forced.code == 0
        assert "free only when they end" in forced.stderr
    assert ask(node.paths.rank(0)) is None


def test_down_is_refused_while_an_engine_has_not_noticed_the_restart(node: Node) -> None:
    """It has the weights mapped: nothing would be free, and it may still give them back."""
    node.up()
    with node.lease():
        assert node("restart").code == 0
    assert node.report().leases == ()
    refused = node("down")
    assert refused.code == 1
    assert f"rank 0: pid {os.getpid()} has not renewed its lease since the" in refused.stderr
    assert node.paths.rank(0).ready_file.exists()
    forced = node("down", "--force")
    assert "given up" in forced.stderr
    assert node.paths.rank(0).served_file.exists()


def test_an_engine_that_ended_during_the_restart_is_not_waited_for(node: Node) -> None:
    node.up()
    engine = subprocess.Popen(
        [sys.executable, "-c", _HOLDING],
        env=environment(node.places), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"held\n"
        assert node("restart").code == 0
        assert node.report().renewing == (engine.pid,)
        engine.kill()
    assert node("down").code == 0


def test_down_ends_the_supervisor_too(node: Node) -> None:
    assert node.up().code == 0
    assert node("down").code == 0

    def is_gone() -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            return probe.connect_ex(str(node.paths.supervisor_socket)) != 0

    wait_for(is_gone, "the supervisor's end")


def test_a_smaller_layout_stops_the_ranks_that_it_has_not(node: Node) -> None:
    assert node.up("--dp", "2").code == 0
    with node.lease(1):
        refused = node.up()
        assert refused.code == 1
        assert "rank 1 would be gone" in refused.stderr
    done = node.up()
    assert done.code == 0
    assert "rank 1 of the old layout down" in done.stderr
    assert ask(node.paths.rank(1)) is None
    assert [row["rank"] for row in node.status()["ranks"]] == [0]


def test_one_rank_that_fails_leaves_the_others_alone(node: Node) -> None:
    log = node.paths.log_file(1, "loader")
    log.mkdir(parents=True)  # so that this loader alone can not be started
    done = node.up("--dp", "2")
    assert done.code == 1
    assert "error: rank 1: the loader failed: " in done.stderr
    assert "rank 0: ready" in done.stderr
    assert node.report(0).state == "ready"
    status = node("status")
    assert status.code == 3
    assert "rank 1: the loader failed" in status.stderr
    log.rmdir()
    assert node("up").code == 0


def test_what_to_type_next_is_of_the_instance_that_failed(node: Node) -> None:
    log = node.places.instance("draft").log_file(0, "loader")
    log.mkdir(parents=True)
    done = node.up("--instance", "draft")
    assert "wcache logs --instance draft 0 shows more" in done.stderr
    doctor = "wcache doctor --instance draft"
    assert doctor in node("status", "--instance", "draft").stderr
    assert doctor in node("status", "draft:0").stderr
    assert "rank draft:0" in node(*doctor.split()[1:]).stdout
    assert node("down", "--instance", "draft").code == 0


def test_a_rank_whose_socket_can_not_be_is_said_before_anything_is_touched(node: Node) -> None:
    node.paths.run.mkdir(parents=True)
    (node.paths.run / "0").write_text("a file where the rank wants its folder")
    done = node.up()
    assert done.code == 75
    assert "not a directory" in done.stderr
    assert not node.paths.config_file.exists()


def test_a_layout_that_can_not_be_is_refused_before_anything_is_touched(node: Node) -> None:
    done = node.up("--tp", "2")
    assert done.code == 78
    assert "split a head" in done.stderr
    assert not node.paths.config_file.exists()
    assert not node.paths.supervisor_socket.exists()


def test_too_little_memory_is_said_before_loading(node: Node) -> None:
    """A checkpoint of 4 TiB, of which the disk holds nothing."""
    nbytes = 4 << 40
    header = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}})
    file = node.model / "model.safetensors"
    with file.open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header.encode())
        try:
            out.truncate(8 + len(header) + nbytes)
        except OSError:
            pytest.skip("this file system has no files of 4 TiB")
    done = node.up()
    assert done.code == 1
    assert "not enough memory: rank 0 needs 4096.0 GiB, " in done.stderr
    assert not node.paths.config_file.exists()


def test_verify_tells_a_changed_checkpoint_from_one_that_is_gone(node: Node) -> None:
    assert node.up().code == 0
    other = write_checkpoint(node.root / "other", llama_tensors(seed=1))
    shutil.copy(other / "model.safetensors", node.model / "model.safetensors")
    changed = node("verify", "--quick")
    assert changed.code == 5
    assert "model.safetensors" in changed.stdout
    refused = node("down"), node("up")
    assert [done.code for done in refused] == [0, 5]
    shutil.rmtree(node.model)
    write_llama(node.model)
    assert node("up").code == 0
    shutil.rmtree(node.model)
    gone = node("verify")
    assert gone.code == 0
    assert "is not there any more" in gone.stdout


def test_verify_goes_on_after_a_rank_that_has_no_weights(node: Node) -> None:
    assert node.up("--dp", "2").code == 0
    assert node("down", "1").code == 0
    done = node("verify")
    assert done.code == 3
    assert "skipped" in done.stdout
    assert done.stdout.count(" ok ") == 5


def test_publish_mode_is_up_before_there_are_weights(node: Node) -> None:
    done = node("up", "--model", "mine", "--loader", "publish", *SMALL)
    assert done.code == 0
    assert "waits for the first engine to publish" in done.stderr
    status = node("status")
    assert status.code == 3
    assert " empty " in status.stdout


def test_other_weights_that_an_engine_published_are_no_success(node: Node) -> None:
    """An engine that is started next would read the disk, or end."""
    from tests.publishing import publish

    assert node("up", "--model", "test-model", "--loader", "publish", *SMALL).code == 0
    publish(node.paths.rank(0), [b"content"])
    done = node("up", "--model", "other", "--loader", "publish", *SMALL)
    assert done.code == 5
    assert "serves other weights: wcache down, once no engine uses them, and" in done.stderr
    status = node("status")
    assert status.code == 5
    assert "hint: wcache down, once no engine uses them, and" in status.stderr
    run = node("run", "--mode", "daemon", "--", "vllm", "serve", "other", "--port", "1")
    assert run.code == 5
    assert "error: rank 0 serves other weights than those of other" in run.stderr
    assert "hint: wcache down, once no engine uses them, and" in run.stderr
    assert node("down").code == 0
    assert node("up").code == 0


def test_a_broken_configuration_hides_nothing_that_runs(node: Node) -> None:
    assert node.up().code == 0
    node.paths.config_file.write_text("[model]\npath = 7\n")
    status = node("status")
    assert status.code == 78
    assert " ready " in status.stdout
    assert status.stderr.count("model.path: expected `str`, got `int`") == 1
    restarted = node("restart")
    assert restarted.code == 0
    assert "adopted" in restarted.stderr
    assert node("down").code == 0


def _heed_ctrl_c() -> None:
    """A shell starts background jobs, as this suite may be one, with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    "command", [("up",), ("run", "--mode", "daemon", "--", sys.executable, "-m", "serve")],
    ids=["up", "run"],
)  # fmt: skip
def test_an_interrupted_up_leaves_the_load_going(node: Node, command: tuple[str, ...]) -> None:
    """Ctrl-C ends the watching: what was asked for is done all the same."""
    assert node.up().code == 0
    assert node("down").code == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "wcache", *command],
        env=environment(node.places), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL, text=True, preexec_fn=_heed_ctrl_c,
    )  # fmt: skip
    assert process.stderr is not None
    first = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(PATIENCE_S) == 130, first + rest
    assert "loading goes on" in rest
    wait_for(lambda: node("status").code == 0, "ready without anybody watching")


def test_up_gives_up_waiting_and_not_the_load(node: Node) -> None:
    done = node.up("--timeout", "0.1")
    assert done.code == 3
    assert "loading goes on" in done.stderr
    assert node("up").code == 0


def test_an_instance_is_apart_from_the_default_one(node: Node) -> None:
    assert node.up("--instance", "draft").code == 0
    assert node("status").code == 4
    assert node("status", "draft:0").code == 0
    assert node("status", "--instance", "draft", "0").code == 0
    assert node("down", "--instance", "draft").code == 0


def test_a_damaged_storage_is_named_with_its_tensors(node: Node) -> None:
    """What an engine published with a digest that its bytes have not."""
    from tests.publishing import publish

    assert node("up", "--model", "test-model", "--loader", "publish", *SMALL).code == 0
    publish(node.paths.rank(0), [b"content"])
    done = node("verify")
    assert done.code == 5
    assert "storage 0 (t0)" in done.stdout
    assert node("verify", "--quick").code == 0


def test_logs_show_every_part(node: Node) -> None:
    assert node.up().code == 0
    shown = node("logs").stdout
    for part in ("daemon[0]", "loader[0]", "supervisor"):
        assert f"{part} " in shown
    assert "daemon" not in node("logs", "0", "--loader").stdout.replace("daemon of", "")


def test_status_as_json_reads_back(node: Node) -> None:
    from wcache.commands.overview import InstanceStatus

    assert node.up().code == 0
    with node.lease():
        status = msgspec.json.decode(node("status", "--json").stdout, type=InstanceStatus)
    assert status.ready
    assert [lease.pid for lease in status.leases] == [os.getpid()]
    assert status.ranks[0].stored_fds == status.ranks[0].expected_fds == 3


def test_the_lock_is_free_again_after_a_killed_up(node: Node) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "wcache", "up", "--model", str(node.model), *SMALL],
        env=environment(node.places), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    process.stderr.readline()
    second = node("up")
    process.kill()
    process.wait(PATIENCE_S)
    process.stderr.close()
    assert second.code == 75
    assert f"pid {process.pid}" in second.stderr
    assert node("up").code == 0


def test_restart_after_the_supervisor_was_killed_keeps_the_weights(node: Node) -> None:
    assert node.up().code == 0
    before = node.report()
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(node.paths.supervisor_socket))
        os.kill(peer_credentials(probe).pid, signal.SIGKILL)
    assert node.report().pid == before.pid
    told = node("status")
    assert told.code == 1
    assert "no supervisor keeps its descriptors" in told.stderr
    done = node("restart")
    assert done.code == 0, done.stderr
    assert node("status").code == 0
    after = node.report()
    assert after.pid != before.pid
    assert before.serving is not None
    assert after.serving is not None
    assert after.serving.how == "adopted"
    assert after.serving.manifest_digest == before.serving.manifest_digest


def test_a_plain_kill_of_the_daemon_loses_nothing(node: Node) -> None:
    assert node.up().code == 0
    before = node.report()
    os.kill(before.pid, signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE_S
    while (after := ask(node.paths.rank(0))) is None or after.pid == before.pid:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert after.serving is not None
    assert after.serving.how == "adopted"


def test_up_after_the_supervisor_was_killed_takes_the_ranks_over(node: Node) -> None:
    assert node.up().code == 0
    before = node.report()
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(node.paths.supervisor_socket))
        os.kill(peer_credentials(probe).pid, signal.SIGKILL)
    done = node("up")
    assert done.code == 0, done.stderr
    wait_for(lambda: node("status").code == 0, "the descriptors are kept again")
    assert node.report().pid == before.pid
