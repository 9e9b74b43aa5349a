"""Sends what it is given to a daemon, a connection each; run by `replays.sent_again_elsewhere`.

Arguments: socket, model. Standard input: [[honest, [frame in hex, …]], …]. Prints the answers of each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from replays import Conversation, sent_again


def main() -> None:
    """All of them in turn."""
    given = [
        Conversation([bytes.fromhex(frame) for frame in frames], honest)
        for honest, frames in json.load(sys.stdin)
    ]
    print(json.dumps(sent_again(Path(sys.argv[1]), sys.argv[2], given)))


if __name__ == "__main__":
    main()
