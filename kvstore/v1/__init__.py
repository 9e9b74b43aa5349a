"""Generated from protos/kvstore/v1 by `make protos`: messages, stubs and servicers. Do not edit."""
