"""What outlives a daemon, and who keeps it meanwhile (`kvstore serve --keep-arena`).

    keeping.py   what is kept, checked against the configuration: the daemon's view
    facts.py     what must be equal for a kept arena to be of use
    writers.py   which processes may still write to it
    base.py      a keeper: descriptors by name
      holder.py, holding.py   a process of its own, and the daemon's end of it
      systemd.py              the service manager's descriptor store
      nothing.py              none

Nothing is imported here: the holder process loads `holder.py` and `wire.py` alone.
"""
