"""The generated code is that of protos/: whoever edits one without the other fails here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import grpc_tools
import pytest
from google.protobuf import descriptor_pb2

from kvstore.v1 import store_pb2 as pb

ROOT = Path(__file__).resolve().parent.parent.parent
PROTO = "kvstore/v1/store.proto"
# What only names the generator's version.
_VERSIONS = re.compile(r"(?m)^# Protobuf Python Version: .*$|^GRPC_GENERATED_VERSION = .*$|^    \d+,\n")


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that `make protos` writes, in a folder of its own."""
    folder = tmp_path_factory.mktemp("protos")
    outs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
    includes = ["-I", str(ROOT / "protos"), "-I", str(Path(grpc_tools.__file__).parent / "_proto")]
    described = f"--descriptor_set_out={folder / 'set'}"
    command = [sys.executable, "-m", "grpc_tools.protoc", *includes, *outs, described, PROTO]
    subprocess.run(command, check=True, timeout=60)
    return folder


def test_the_messages_are_those_of_the_source(generated: Path) -> None:
    found = descriptor_pb2.FileDescriptorSet.FromString((generated / "set").read_bytes()).file[0]
    found.ClearField("source_code_info")
    waiting = list(found.message_type)
    while waiting:  # a descriptor set spells out names that a module leaves to be derived
        message = waiting.pop()
        waiting += message.nested_type
        for field in message.field:
            field.ClearField("json_name")
    assert found == descriptor_pb2.FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)


@pytest.mark.parametrize("name", ["store_pb2.py", "store_pb2.pyi", "store_pb2_grpc.py"])
def test_the_files_are_those_that_are_generated(generated: Path, name: str) -> None:
    fresh, kept = (generated / "kvstore/v1" / name).read_text(), (ROOT / "kvstore/v1" / name).read_text()
    if _VERSIONS.findall(fresh) != _VERSIONS.findall(kept):  # another generator: its text may differ
        methods = {
            f"/{s.full_name}/{m.name}" for s in pb.DESCRIPTOR.services_by_name.values() for m in s.methods
        }
        assert name != "store_pb2_grpc.py" or set(re.findall(r"'(/kvstore\.v1\.\w+/\w+)'", kept)) == methods
    else:
        assert fresh == kept


def test_every_field_number_is_used_once_and_every_message_is_described() -> None:
    source = (ROOT / "protos" / PROTO).read_text()
    for message in pb.DESCRIPTOR.message_types_by_name.values():
        numbers = [field.number for field in message.fields]
        assert len(set(numbers)) == len(numbers)
    for service in pb.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            line = next(n for n, text in enumerate(source.splitlines()) if f"rpc {method.name}(" in text)
            assert source.splitlines()[line - 1].lstrip().startswith("//"), method.full_name
