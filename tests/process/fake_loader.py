"""Plays a rank's loader: writes down that it ran and ends as FAKE_DIR/RANK.loader.json says."""

import json
import os
import signal
import sys
import time
from pathlib import Path

folder, rank = Path(os.environ["FAKE_DIR"]), sys.argv[1]
file = folder / f"{rank}.loader.json"
orders = json.loads(file.read_text()) if file.exists() else {}
if orders.get("deaf"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
clean = not any(name.startswith(("NOTIFY_", "LISTEN_", "WATCHDOG_")) for name in os.environ)
with (folder / f"{rank}.loads").open("a") as loads:
    loads.write(json.dumps({"pid": os.getpid(), "clean": clean}) + "\n")
time.sleep(orders.get("seconds", 0))
sys.exit(orders.get("code", 0))
