"""``python -m wcache.supervise`` with the times of FAKE_TIMING and with processes that play theirs.

Takes the same arguments.
"""

import json
import os
import sys
from pathlib import Path

from wcache.supervise.__main__ import main
from wcache.supervise.direct.timing import Commands, Timing

here = Path(__file__).parent
sys.exit(
    main(
        sys.argv[1:],
        timing=Timing(**json.loads(os.environ["FAKE_TIMING"])),
        commands=Commands(
            daemon=(sys.executable, str(here / "fake_daemon.py")),
            loader=(sys.executable, str(here / "fake_loader.py")),
        ),
    )
)
