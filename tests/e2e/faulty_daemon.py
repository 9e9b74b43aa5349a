"""`kvstore` whose disks do wrong what the first argument says (native/src/disk_faulty.h).

python faulty_daemon.py stall_ms=5000:1 serve --config FILE
"""

from __future__ import annotations

import functools
import sys

from kvstore import daemon
from kvstore.cli import main

if __name__ == "__main__":
    daemon.Daemon = functools.partial(daemon.Daemon, disk_faults=sys.argv[1])  # type: ignore[assignment,misc]
    main(sys.argv[2:])
