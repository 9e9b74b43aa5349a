"""Other stores, each run by a small process inside its own virtual environment (`make peers`).

`serve.py` is the side they share: memory, memcpy, keys of the chains, and a protocol of one line a request on
stdin and one line of JSON a reply on stdout. One leaf file per store holds what is particular to it.
None of them imports anything of kvstore.
"""
