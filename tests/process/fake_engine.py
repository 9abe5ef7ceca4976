"""Plays an engine with an API: logs as one, listens on a port after a while, completes a token.

usage: fake_engine.py PORT [FLAG...]; flags: hang (never answers), die (ends with 9 at once),
orphan (leaves a process behind in its group, whose pid it prints), deaf (has that one ignore
SIGTERM), chatty (says more at its end than a pipe holds), refuse (has no completions), portless
(never listens), sign (is read by run_launcher.py). Ends with 17 on SIGTERM.
"""

import http.server
import json
import os
import signal
import subprocess
import sys
import time

from wcache.engines.orders import Orders, report


class Api(http.server.BaseHTTPRequestHandler):
    calls = 0

    def do_POST(self) -> None:
        Api.calls += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        # As a server whose model is not there yet.
        code = 503 if Api.calls < 3 or "hang" in sys.argv else 200
        if "refuse" in sys.argv:
            code = 404
        body = json.dumps({"choices": [{"text": "a"}]}).encode() if code == 200 else b"{}"
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def ask(_number: int, _frame: object) -> None:
    if "chatty" in sys.argv:
        print("a word\n" * 300_000 + "the last word", flush=True)
    sys.exit(17)


def main() -> None:
    print(f"engine {os.getpid()}\nimports are done", flush=True)
    if "die" in sys.argv:
        sys.exit(9)
    if "orphan" in sys.argv:
        program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        program = (program if "deaf" in sys.argv else "import time\n") + "print(1, flush=True)\n"
        left = subprocess.Popen(
            [sys.executable, "-c", program + "time.sleep(600)"], stdout=subprocess.PIPE
        )
        assert left.stdout
        left.stdout.readline()
        print(f"orphan {left.pid}", flush=True)
    signal.signal(signal.SIGTERM, ask)
    orders = Orders.given()
    time.sleep(0.05)
    report(orders, "map", seconds=0.01, rank=0)
    report(orders, "outcome", rank=0, outcome="hit", reason="attached to generation 1")
    print("capture took no time", file=sys.stderr, flush=True)
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC"):
        print(f"{name} is {'set' if name in os.environ else 'unset'}", flush=True)
    if "portless" in sys.argv:
        time.sleep(600)
    server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Api)
    server.serve_forever(0.05)


if __name__ == "__main__":
    main()
