"""Tenants apart, seen from outside: a running daemon is asked as two of them, over every door that it has.

verdicts     what a check found, and what that makes of a door and of the whole
looks        a question for blocks, and how it ended
probe        who asks, about which made-up blocks, and what nobody else may ever see of them
running      the order of things
as_configured               whether the daemon has the doors that the audit was told of
session, session_door, session_holdings    the Unix socket of engines
channels, calls, grpc_visit, grpc_door      the public API, at each of its addresses: who gets in
grpc_blocks  and what a tenant may find of another's there
nvme_door, segments         what lies on the disk
pages_door                  the status report and the metrics page
events_door                 KV events over ZMQ
secret_file, modes          files, and who may open them

Nothing real is touched: the blocks are a few KiB of random bytes under random token ids of a model that no
engine has, and they are dropped at the end.
"""

from __future__ import annotations

from kvstore.audit.probe import Pair, pick
from kvstore.audit.running import Given, audit
from kvstore.audit.verdicts import Door, Finding, Report, Verdict

__all__ = ["Door", "Finding", "Given", "Pair", "Report", "Verdict", "audit", "pick"]
