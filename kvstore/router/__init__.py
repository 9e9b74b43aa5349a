"""The router: sends a request to the replica where its prefix lives."""
