"""``wcache run`` around an engine: signals, exit codes, readiness, what is left behind."""

import http.server
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.processes import PATIENCE_S, Store, end, wait_for
from wcache.run.timeline import Record

pytestmark = pytest.mark.process

LAUNCHER = Path(__file__).parent / "run_launcher.py"


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Run:
    """A launcher as a process, with its output in a file."""

    def __init__(self, folder: Path, port: int, timeout_s: float, *flags: str, **env: str) -> None:
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(LAUNCHER), str(port), str(timeout_s), *flags],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
            )  # fmt: skip

    @property
    def text(self) -> str:
        return self.log.read_text()

    def record(self, kind: str) -> Record:
        found = re.findall(rf"^{kind} (.*)$", self.text, re.MULTILINE)
        assert len(found) == 1, self.text
        return msgspec.json.decode(found[0], type=Record)

    def wait_ready(self) -> None:
        wait_for(lambda: "\nREADY " in self.text, f"ready: {self.text}")


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for one in started:
        end(one.process, signal.SIGTERM)


def test_the_first_token_and_not_the_open_port_makes_an_engine_ready(
    runs: list[Run], tmp_path: Path, port: int
) -> None:
    runs.append(run := Run(tmp_path, port, 60))
    run.wait_ready()
    record = run.record("READY")
    assert [phase.name for phase in record.phases] == [
        "imports", "weights", "capture", "port", "first token",
    ]  # fmt: skip
    assert [phase.source for phase in record.phases] == ["log", "event", "log", "probe", "probe"]
    ends = [phase.end_s for phase in record.phases]
    assert ends == sorted(ends)
    assert record.ready_s == ends[-1]
    assert [phase.begin_s for phase in record.phases[1:]] == ends[:-1]
    assert record.outcome == "hit"
    assert record.reason == "rank 0: attached to generation 1"
    assert [(step.name, step.seconds) for step in record.steps] == [("map", 0.01)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_engine_and_its_exit_code_comes_back(
    runs: list[Run], tmp_path: Path, port: int, number: signal.Signals
) -> None:
    runs.append(run := Run(tmp_path, port, 60))
    run.wait_ready()
    run.process.send_signal(number)
    # Python ends with a KeyboardInterrupt by the signal itself, as a shell sees it.
    expected = 17 if number == signal.SIGTERM else 128 + signal.SIGINT
    assert run.process.wait(PATIENCE_S) == expected
    assert run.record("ENDED").exit_code == expected


def test_an_engine_inherits_what_is_ignored(runs: list[Run], tmp_path: Path, port: int) -> None:
    """As ``nohup`` has it of the hangup: neither wcache nor the engine ends when its shell does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        runs.append(run := Run(tmp_path, port, 60))
    finally:
        signal.signal(signal.SIGHUP, before)
    run.wait_ready()
    run.process.send_signal(signal.SIGHUP)
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(PATIENCE_S) == 17


def test_an_engine_that_dies_is_told_with_its_code(
    runs: list[Run], tmp_path: Path, port: int
) -> None:
    runs.append(run := Run(tmp_path, port, 60, "die"))
    assert run.process.wait(PATIENCE_S) == 9
    record = run.record("ENDED")
    assert record.ready_s is None
    assert [phase.name for phase in record.phases] == ["imports"]


def test_an_engine_that_gives_no_token_is_ended_and_its_last_phase_named(
    runs: list[Run], tmp_path: Path, port: int
) -> None:
    runs.append(run := Run(tmp_path, port, 2, "hang"))
    assert run.process.wait(PATIENCE_S) == 3
    assert "gave no token within 2 s" in run.text
    assert "the last phase that it finished is port" in run.text
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=1)


def test_a_port_in_use_is_refused_before_anything_is_started(
    runs: list[Run], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
        runs.append(run := Run(tmp_path, port, 60))
        assert run.process.wait(PATIENCE_S) == 1
    assert run.text == f"error: port {port} is in use already\n"


def test_the_answers_of_a_stranger_on_the_engines_port_do_not_make_it_ready(
    runs: list[Run], tmp_path: Path, port: int
) -> None:
    runs.append(run := Run(tmp_path, port, 4, "portless"))
    wait_for(lambda: "WATCHDOG_USEC is" in run.text, "the engine's start")

    class Stranger(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = b'{"choices": [{"text": "a"}]}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with http.server.HTTPServer(("127.0.0.1", port), Stranger) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        assert run.process.wait(PATIENCE_S) == 3
        server.shutdown()
    assert "\nREADY " not in run.text
    assert "the last phase that it finished is capture; another process listens" in run.text


def test_an_engine_that_serves_without_completions_is_ready_and_it_is_said_why(
    runs: list[Run], tmp_path: Path, port: int
) -> None:
    runs.append(run := Run(tmp_path, port, 60, "refuse"))
    run.wait_ready()
    record = run.record("READY")
    assert record.tokenless == "/v1/completions answers 404 Not Found"
    assert record.ready_s is not None
    assert record.phases[-1].name == "port"


def test_an_engine_that_can_not_be_asked_is_ready_when_its_log_says_so(
    runs: list[Run], tmp_path: Path, port: int
) -> None:
    store = Store(tmp_path / "notify")
    runs.append(run := Run(tmp_path, port, 1, "portless", "sign", NOTIFY_SOCKET=str(store.path)))
    store.serve(lambda: "READY=1" in store.said)
    wait_for(lambda: "\nREADY " in run.text, "ready")
    assert run.record("READY").tokenless == "its API can not be asked for one"
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(PATIENCE_S) == 17


def test_what_was_told_outlives_the_file_in_which_it_was(
    runs: list[Run], tmp_path: Path, port: int
) -> None:
    runs.append(run := Run(tmp_path, port, 60, TMPDIR=str(tmp_path)))
    run.wait_ready()
    for file in tmp_path.glob("wcache-run-*/events"):
        file.unlink()
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(PATIENCE_S) == 17
    assert run.record("ENDED").outcome == "hit"


def test_what_an_engine_leaves_behind_is_ended_with_it(
    runs: list[Run], tmp_path: Path, port: int
) -> None:
    runs.append(run := Run(tmp_path, port, 60, "orphan"))
    run.wait_ready()
    orphan = int(re.findall(r"orphan (\d+)", run.text)[0])
    pidfd = os.pidfd_open(orphan)
    try:
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(PATIENCE_S) == 17
        wait_for(lambda: _has_ended(pidfd), "the orphan's end")
    finally:
        os.close(pidfd)


def test_a_second_signal_ends_what_is_left_at_once_and_the_code_still_comes_back(
    runs: list[Run], tmp_path: Path, port: int
) -> None:
    runs.append(run := Run(tmp_path, port, 60, "orphan", "deaf"))
    run.wait_ready()
    engine, orphan = (
        os.pidfd_open(int(re.findall(rf"{who} (\d+)", run.text)[0])) for who in ("engine", "orphan")
    )
    try:
        run.process.send_signal(signal.SIGTERM)
        wait_for(lambda: _has_ended(engine), "the engine's end")
        assert not _has_ended(orphan)
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(PATIENCE_S) == 17
        wait_for(lambda: _has_ended(orphan), "the orphan's end")
    finally:
        os.close(engine)
        os.close(orphan)


def test_what_an_engine_says_at_its_end_is_heard_and_does_not_keep_it_from_ending(
    runs: list[Run], tmp_path: Path, port: int
) -> None:
    runs.append(run := Run(tmp_path, port, 2, "hang", "chatty"))
    assert run.process.wait(PATIENCE_S) == 3
    assert "\nthe last word\n" in run.text


def test_a_process_that_never_stops_talking_does_not_outlive_its_engine(tmp_path: Path) -> None:
    program = (
        "import sys; from wcache.run.child import Child\n"
        "command = ['sh', '-c', 'yes & yes & yes & yes & sleep 0.5; exit 5']\n"
        "with Child(command, {'PATH': '/usr/bin:/bin'}, line_seen=lambda line: None) as child:\n"
        "    status = child.wait(lambda: False, lambda: None)\n"
        "sys.exit(status)\n"
    )
    with (tmp_path / "log").open("wb") as log:
        ran = subprocess.run([sys.executable, "-c", program], stdout=log, timeout=PATIENCE_S)
    assert ran.returncode == 5
    assert (tmp_path / "log").read_bytes().startswith(b"y\ny\n")


@pytest.mark.parametrize(
    ("command", "keys", "code"),
    [("read word; exit 4", b"word\n", 4), ("exec sleep 600", b"\x03", 130)],
    ids=["an end of its own", "Ctrl-C"],
)
def test_an_engine_has_the_terminal_and_its_code_comes_back(
    command: str, keys: bytes, code: int
) -> None:
    program = (
        "import sys; from wcache.run.child import Child\n"
        "with Child(['sh', '-c', sys.argv[1]], {'PATH': '/usr/bin:/bin'}) as child:\n"
        "    print('started', flush=True)\n"
        "    status = child.wait(lambda: False, lambda: None)\n"
        "sys.exit(status)\n"
    )
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-c", program, command])
    pidfd = os.pidfd_open(pid)
    try:
        said = b""
        while b"started" not in said:
            said += os.read(terminal, 4096)
        os.write(terminal, keys)
        wait_for(lambda: _has_ended(pidfd), "the end")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    finally:
        if not _has_ended(pidfd):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(pidfd)
        os.close(terminal)


def test_a_supervisor_hears_of_the_first_token_and_the_engine_never_of_the_supervisor(
    runs: list[Run], tmp_path: Path, port: int
) -> None:
    store = Store(tmp_path / "notify")
    runs.append(run := Run(tmp_path, port, 60, NOTIFY_SOCKET=str(store.path)))
    store.serve(lambda: "READY=1" in store.said)
    assert "EXTEND_TIMEOUT_USEC=60000000" in store.said
    assert any(said.startswith("STATUS=starting") for said in store.said)
    wait_for(lambda: "NOTIFY_SOCKET is unset" in run.text, "what the engine saw")


def _has_ended(pidfd: int) -> bool:
    import select

    return bool(select.select([pidfd], [], [], 0)[0])
