"""Names that stand for two things, and what has no place in a key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvstore.connectors.vllm.binding import Binder, Bound
from made_requests import (
    BLOCK,
    WIDTH,
    Image,
    feature_of,
    identifier_of,
    keys_of,
    make_adapters,
    plain,
    write_adapter,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request


@pytest.fixture(scope="module", autouse=True)
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    yield from make_adapters(tmp_path_factory.mktemp("adapters"))


# ---- one thing at a time ----------------------------------------------------------------------------------

TOKENS = list(range(16))


def keys(binder: Binder, request: Request, epoch: bytes = b"") -> list[bytes]:
    return keys_of(request, binder.bind(request, BLOCK, epoch))


def with_image(content: int = 0, identifier: str = "", offset: int = 5, **more: Any) -> Request:
    return plain(TOKENS, mm_features=[feature_of(Image(offset, 4, "cat", content), identifier)], **more)


def test_text_alone_binds_nothing() -> None:
    assert Binder().bind(plain(TOKENS), BLOCK) == Bound()


def test_salts_and_epochs_keep_requests_apart() -> None:
    binder = Binder()
    found = [keys(binder, plain(TOKENS, cache_salt=salt)) for salt in (None, "a", "b", "\ud800")]
    found += [keys(binder, plain(TOKENS), epoch) for epoch in (b"1" * 16, b"2" * 16)]
    assert len({key for chain in found for key in chain}) == 6 * 4
    assert keys(binder, plain(TOKENS, cache_salt="")) == found[0]


def test_an_image_counts_from_its_first_block_on() -> None:
    without, one, other = (
        keys(Binder(), plain(TOKENS)),
        keys(Binder(), with_image()),
        keys(Binder(), with_image(1)),
    )
    assert [a == b for a, b in zip(without, one, strict=True)] == [True, False, False, False]
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, False, False]


def test_one_image_is_shared_between_engines() -> None:
    assert keys(Binder(), with_image()) == keys(Binder(), with_image())


def test_one_image_under_two_identifiers_is_two() -> None:
    """vLLM's own cache keeps them apart, and an engine's mirror of it must agree with the keys."""
    assert keys(Binder(), with_image())[1] != keys(Binder(), with_image(identifier=identifier_of("dog")))[1]


def test_two_images_under_one_identifier_are_never_shared() -> None:
    """A caller's id may look like a digest: hashed together with processor options, or chosen so."""
    assert keys(Binder(), with_image(0))[1] != keys(Binder(), with_image(1))[1]


def test_a_second_image_under_an_identifier_ends_belief_in_it() -> None:
    """vLLM may give either request the encoder output of the other."""
    binder = Binder()
    first = binder.bind(with_image(0), BLOCK)
    unconcerned = binder.bind(with_image(0, identifier_of("dog")), BLOCK)
    assert binder.holds(first)
    assert "several contents" in binder.bind(with_image(1), BLOCK).reason
    assert not binder.holds(first)
    assert "several contents" in binder.bind(with_image(0), BLOCK).reason
    assert binder.holds(unconcerned)


def test_media_are_noted_even_if_their_request_is_refused() -> None:
    binder = Binder()
    first = binder.bind(with_image(0), BLOCK)
    lost = LoRARequest("x", 1, "/nowhere")
    assert binder.bind(with_image(1, lora_request=lost), BLOCK).reason
    assert not binder.holds(first)
    third = binder.bind(with_image(0, identifier_of("dog")), BLOCK)
    assert binder.bind(with_image(1, identifier_of("dog"), resumable=True), BLOCK).reason
    assert not binder.holds(third)


@pytest.mark.parametrize("identifier", ["my-cat", "0" * 63, "A" * 64, "g" * 64, f"sql:{'0' * 64}"])
def test_an_id_of_the_callers_choice_is_refused(identifier: str) -> None:
    assert "of the caller's choice" in Binder().bind(with_image(identifier=identifier), BLOCK).reason


@pytest.mark.parametrize("digits", [64, 128])
def test_digests_of_all_of_vllms_hashes_are_known(digits: int) -> None:
    assert not Binder().bind(with_image(identifier="0f" * (digits // 2)), BLOCK).reason


def test_media_that_cannot_be_read_are_refused() -> None:
    binder = Binder()
    first = binder.bind(with_image(), BLOCK)
    for data, why in (
        (None, "NoneType"),
        (
            MultiModalKwargsItem({"x": MultiModalFieldElem(data=None, field=MultiModalBatchedField())}),
            "not there",
        ),
        (
            MultiModalKwargsItem({"x": MultiModalFieldElem(data=[object()], field=MultiModalBatchedField())}),
            "object",
        ),
    ):
        request = with_image()
        request.mm_features[0].data = data
        assert why in binder.bind(request, BLOCK).reason
        assert not binder.holds(first)


def test_a_handle_to_shared_memory_is_not_content() -> None:
    """With `mm_processor_cache_type="shm"` the scheduler sees addresses, the same in every engine."""
    handle = {"address": 0, "monotonic_id": 0, "signature": [1]}
    elements = {key: MultiModalFieldElem(data=v, field=MultiModalBatchedField()) for key, v in handle.items()}
    request = with_image()
    request.mm_features[0].data = MultiModalKwargsItem(elements)
    assert "lru" in Binder().bind(request, BLOCK).reason


def test_media_out_of_order_are_refused() -> None:
    features = [feature_of(Image(8, 2, "cat", 0)), feature_of(Image(0, 2, "dog", 1))]
    assert "order" in Binder().bind(plain(TOKENS, mm_features=features), BLOCK).reason


def test_a_full_table_forgets_nothing() -> None:
    binder = Binder(media_max=1)
    first = binder.bind(with_image(), BLOCK)
    assert "more than 1 media" in binder.bind(with_image(1, identifier_of("dog")), BLOCK).reason
    assert binder.bind(with_image(), BLOCK) == first
    assert "several contents" in binder.bind(with_image(1), BLOCK).reason


def test_kinds_sizes_and_bytes_of_data_all_count() -> None:
    one = torch.tensor([[1.0, 2.0]])
    values: list[Any] = [
        one,
        one.T.contiguous(),
        one.half(),
        one.view(torch.int32),
        one.numpy(),
        [one],
        (one,),
    ]
    values += [
        [one, one],
        [[one], one],
        [one, [one]],
        [one[0, 0], one[0, 1]],
        1,
        1.0,
        True,
        "1",
        torch.empty(0),
    ]
    values += [torch.empty(0, 2), np.float32(1), torch.tensor(1.0), [], [[]], np.arange(2), torch.arange(2)]
    found = set()
    for value in values:
        request = with_image()
        element = MultiModalFieldElem(data=value, field=MultiModalBatchedField())
        request.mm_features[0].data = MultiModalKwargsItem({"x": element})
        found.add(keys(Binder(), request)[1])
    assert len(found) == len(values)
    request = with_image()
    same = MultiModalFieldElem(
        data=torch.tensor([[1.0, 9.0, 2.0, 9.0]])[:, ::2], field=MultiModalBatchedField()
    )
    request.mm_features[0].data = MultiModalKwargsItem({"x": same})
    assert keys(Binder(), request)[1] in found  # strides are not content


# ---- adapters ---------------------------------------------------------------------------------------------


def with_adapter(path: Path, number: int = 1, name: str = "sql", **more: Any) -> Request:
    return plain(TOKENS, lora_request=LoRARequest(name, number, str(path), **more))


def test_changed_weights_under_one_path_are_new_in_a_new_engine(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", b"old")
    old = keys(Binder(), with_adapter(tmp_path / "a"))
    write_adapter(tmp_path / "a", b"new")
    new = keys(Binder(), with_adapter(tmp_path / "a"))
    write_adapter(tmp_path / "a", b"old")
    assert not set(old) & set(new)
    assert keys(Binder(), with_adapter(tmp_path / "a", number=7)) == old  # the number is each engine's own
    (tmp_path / "a" / "adapter_config.json").write_text('{"r": 16}')
    assert not set(old) & set(keys(Binder(), with_adapter(tmp_path / "a")))


def test_weights_changed_under_a_running_engine_end_belief_in_the_adapter(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", b"old")
    binder = Binder()
    first = binder.bind(with_adapter(tmp_path / "a"), BLOCK)
    assert binder.holds(first)
    write_adapter(tmp_path / "a", b"new")
    assert not binder.holds(first)
    assert "changed" in binder.bind(with_adapter(tmp_path / "a"), BLOCK).reason
    write_adapter(tmp_path / "a", b"old")
    assert "changed" in binder.bind(with_adapter(tmp_path / "a"), BLOCK).reason


def test_an_adapter_written_after_the_engine_started_is_refused(tmp_path: Path) -> None:
    """vLLM loads adapters by calls that we do not see: perhaps before the files became what they are."""
    write_adapter(tmp_path / "a", b"old")
    binder = Binder(since=(tmp_path / "a" / "adapter_config.json").stat().st_ctime_ns - 1)
    assert "changed" in binder.bind(with_adapter(tmp_path / "a"), BLOCK).reason


def test_a_link_that_is_turned_is_a_change(tmp_path: Path, adapters: list[Path]) -> None:
    (tmp_path / "now").symlink_to(adapters[0])
    binder, before = Binder(), Binder(since=(tmp_path / "now").lstat().st_ctime_ns - 1)
    assert not binder.bind(with_adapter(tmp_path / "now"), BLOCK).reason
    assert before.bind(with_adapter(tmp_path / "now"), BLOCK).reason
    (tmp_path / "now").unlink()
    (tmp_path / "now").symlink_to(adapters[1])
    assert "changed" in binder.bind(with_adapter(tmp_path / "now"), BLOCK).reason


def test_a_number_stands_for_one_path(adapters: list[Path]) -> None:
    """vLLM goes by the number: a new path under it is not loaded."""
    binder = Binder()
    assert not binder.bind(with_adapter(adapters[0]), BLOCK).reason
    assert binder.bind(with_adapter(adapters[2]), BLOCK).reason
    assert binder.bind(with_adapter(adapters[0]), BLOCK).reason
    assert not binder.bind(with_adapter(adapters[0], number=2), BLOCK).reason


def test_loading_in_place_is_refused_for_good(adapters: list[Path]) -> None:
    binder = Binder()
    first = binder.bind(with_adapter(adapters[0]), BLOCK)
    assert "load_inplace" in binder.bind(with_adapter(adapters[0], load_inplace=True), BLOCK).reason
    assert not binder.holds(first)
    assert binder.bind(with_adapter(adapters[0]), BLOCK).reason


def test_an_adapter_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", Path("org/never-downloaded"), Path("not an id")):
        assert "no weights" in Binder().bind(with_adapter(path), BLOCK).reason


def test_names_paths_and_layouts_of_adapters_count(adapters: list[Path]) -> None:
    found = [
        keys(Binder(), with_adapter(adapters[0])),
        keys(Binder(), with_adapter(adapters[0], name="other")),
        keys(Binder(), with_adapter(adapters[2])),
        keys(Binder(), with_adapter(adapters[0], is_3d_lora_weight=True)),
        keys(Binder(), plain(TOKENS)),
    ]
    assert len({key for chain in found for key in chain}) == 5 * 4


def test_encoder_outputs_that_depend_on_an_adapter_are_told_apart(adapters: list[Path]) -> None:
    """With LoRA in the encoder, vLLM keeps outputs under the adapter's *name*."""
    binder, name = Binder(), f"sql:{identifier_of('cat')}"
    lora = [LoRARequest("sql", 1, str(adapters[0])), LoRARequest("sql", 2, str(adapters[1]))]
    first = binder.bind(with_image(identifier=name, lora_request=lora[0]), BLOCK)
    assert not first.reason
    assert "several contents" in binder.bind(with_image(identifier=name, lora_request=lora[1]), BLOCK).reason
    assert not binder.holds(first)


# ---- what has no place in a key ---------------------------------------------------------------------------


def test_what_we_do_not_know_is_refused() -> None:
    binder = Binder()
    streaming = plain(TOKENS, resumable=True)
    assert "streaming" in binder.bind(streaming, BLOCK).reason
    pooling = plain(TOKENS, sampling_params=None, pooling_params=PoolingParams())
    assert "pooling" in binder.bind(pooling, BLOCK).reason
    for extra, why in (
        ({"steer": 1}, "steer"),
        ({"ec_transfer_params": {"x": 1}}, "ec_transfer_params"),
        ({"kv_transfer_params": {"kvstore": {"reuse": "own"}}}, ""),
    ):
        request = plain(TOKENS, sampling_params=SamplingParams(max_tokens=2, extra_args=extra))
        reason = binder.bind(request, BLOCK).reason
        assert why in reason
        assert bool(why) == bool(reason)


def test_embeddings_of_another_dtype_are_others() -> None:
    rows = torch.ones(8, WIDTH)
    found = {keys(Binder(), plain(None, prompt_embeds=rows.to(d)))[0] for d in (torch.float32, torch.int32)}
    assert len(found) == 2
    assert Binder().bind(plain(None, prompt_embeds=rows), BLOCK).extra.keys() == {0, 1}


def test_every_field_of_a_request_was_decided() -> None:
    """A new vLLM may bring something that changes KV: look at it, bind or refuse it, then name it here."""
    assert {f.name for f in fields(MultiModalFeatureSpec)} == {
        "data",
        "modality",
        "identifier",
        "mm_position",
        "mm_hash",
    }
    assert {f.name for f in fields(PlaceholderRange)} == {"offset", "length", "is_embed"}
    assert set(LoRARequest.__struct_fields__) == {
        *("lora_name", "lora_int_id", "lora_path", "load_inplace", "is_3d_lora_weight"),
        "base_model_name",  # what the API shows
    }
    bound = {"lora_request", "mm_features", "cache_salt", "prompt_embeds", "prompt_is_token_ids"}
    refused = {"pooling_params", "resumable", "ec_transfer_params"}
    tokens = {"prompt_token_ids", "num_prompt_tokens", "all_token_ids", "output_token_ids", "sampling_params"}
    ours = {"kv_transfer_params", "kv_cache_report_mode", "skip_reading_prefix_cache", "block_hashes"}
    who = {
        "request_id",
        "client_index",
        "priority",
        "trace_headers",
        "session_id",
        "arrival_time",
        "max_tokens",
    }
    course = {
        *(
            "status",
            "events",
            "stop_reason",
            "structured_output_request",
            "num_output_placeholders",
            "kv_hints",
        ),
        *(
            "num_stale_output_tokens",
            "drop_stale_output",
            "num_in_flight_tokens",
            "next_decode_eligible_step",
        ),
        *(
            "last_sched_seq",
            "spec_token_ids",
            "num_computed_tokens",
            "is_prefill_chunk",
            "shared_prefix_boundary",
        ),
        *("replay_start", "num_nans_in_logits", "num_preemptions", "prefill_stats", "spec_decode_metrics"),
        *("streaming_queue", "abort_immediately"),
    }
    public = {name for name in vars(plain(TOKENS)) if not name.startswith("_")}
    assert public == bound | refused | tokens | ours | who | course
