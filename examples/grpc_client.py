"""Everything a caller without a device does over gRPC, with the generated stubs and nothing else.

    python examples/grpc_client.py save                  # some bytes for a prompt
    python examples/grpc_client.py lookup                # how much of the prompt is known, and where
    python examples/grpc_client.py fetch --out kv.bin    # its block bytes, verified, into a file
    python examples/grpc_client.py subscribe             # what becomes readable and what leaves

The daemon prints where it listens; another place is named with --address unix:/path or host:port.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc

from kvstore.config import Config
from kvstore.rpc.endpoints import endpoints
from kvstore.v1 import store_pb2 as pb
from kvstore.v1 import store_pb2_grpc as rpc

# A block of SmolLM2-135M in bfloat16: 16 tokens, 30 layers, 3 KV heads of 64: 360 KiB.
LAYOUT = pb.Layout(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", block_tokens=16)
BLOCK_BYTES = 30 * 3 * (2 * 16 * 64 * 2)
NAMESPACE = pb.Namespace(
    model="HuggingFaceTB/SmolLM2-135M-Instruct",
    weights="main",
    tokenizer="main",
    adapter="none",
    attention="rope=1e5",
    kv_dtype="bfloat16",
)


def prompt(tokens: int, tenant: str) -> pb.Chain:
    """A prompt: who asks, what the model is, and the token ids. The daemon makes the keys."""
    ids = pb.Tokens(ids=range(1000, 1000 + tokens))
    return pb.Chain(tenant=tenant, namespace=NAMESPACE, layout=LAYOUT, tokens=ids)


def save(store: rpc.StoreStub, chain: pb.Chain) -> None:
    """Send the KV of every full block that the daemon does not have yet."""
    known = store.Plan(pb.PlanRequest(chain=chain))

    def stream() -> Iterator[pb.SaveRequest]:
        yield pb.SaveRequest(header=pb.SaveHeader(chain=chain, start=known.blocks))
        for block in range(known.blocks, known.asked_blocks):
            yield pb.SaveRequest(data=pb.SaveData(data=bytes([block % 256]) * BLOCK_BYTES))

    saved = store.Save(stream())
    print(f"{saved.ready} blocks saved, {known.blocks + saved.filled} were there, {saved.dropped} dropped")


def lookup(store: rpc.StoreStub, chain: pb.Chain) -> None:
    """Ask, with a lease that keeps the match until it is released or lease_s pass without use."""
    found = store.Lookup(pb.LookupRequest(chain=chain))
    print(f"{found.blocks} of {found.asked_blocks} blocks are known: {found.plan.reason}")
    for span in found.plan.spans:
        print(f"  blocks {span.start} to {span.stop} on {pb.Tier.Name(span.tier)}")
    if found.lease:
        store.Release(pb.ReleaseRequest(lease=found.lease))


def fetch(store: rpc.StoreStub, chain: pb.Chain, out: Path) -> None:
    """Write block bytes to a file: [block][layer][head][cell], as far as they are known and sound."""
    with out.open("wb") as file:
        for message in store.Fetch(pb.FetchRequest(chain=chain)):
            if message.HasField("data"):
                file.write(message.data.data)
            elif message.HasField("end"):
                print(f"blocks up to {message.end.stop} are in {out}; compute the rest {message.end.reason}")


def subscribe(store: rpc.StoreStub, tenant: str, items: int) -> None:
    """Follow a trust group. To resume, send the last epoch and sequence that had `last` set."""
    stream, ended = store.Subscribe(pb.SubscribeRequest(tenant=tenant)), 0
    for message in stream:
        item = message.snapshot if message.HasField("snapshot") else message.event
        what = "known" if message.HasField("snapshot") else pb.EventKind.Name(item.kind)
        print(
            f"{message.sequence}: {what}, {len(item.keys) // 32} keys on {pb.Tier.Name(item.tier)}",
            flush=True,
        )
        ended += message.last
        if message.last and ended == items:
            stream.cancel()
            return


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("verb", choices=("save", "lookup", "fetch", "subscribe"))
    parser.add_argument("--address", default=endpoints(Config.load())[0].address)
    parser.add_argument("--tenant", default="default")
    parser.add_argument("--tokens", type=int, default=100, help="length of the prompt")
    parser.add_argument("--out", type=Path, default=Path("kv.bin"))
    parser.add_argument("--items", type=int, default=0, help="snapshots and events to follow, 0 = for ever")
    options = parser.parse_args()
    chain = prompt(options.tokens, options.tenant)
    with grpc.insecure_channel(options.address) as channel:
        store = rpc.StoreStub(channel)
        try:
            if options.verb == "save":
                save(store, chain)
            elif options.verb == "lookup":
                lookup(store, chain)
            elif options.verb == "fetch":
                fetch(store, chain, options.out)
            else:
                subscribe(store, options.tenant, options.items)
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
