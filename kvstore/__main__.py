"""`python -m kvstore` is `kvstore`."""

from kvstore.cli import main

main()
