"""The public gRPC API (protos/kvstore/v1/store.proto), on the daemon's own event loop."""
