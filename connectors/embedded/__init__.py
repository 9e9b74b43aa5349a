"""A small Llama-family engine with real paged attention: kvstore run and proven without a GPU."""
