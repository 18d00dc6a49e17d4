"""Bytes and operations of a decode step, against numbers worked out by hand from the configs."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from windowed_mtp.cost.families import GeometryError, geometry_of, read_geometry
from windowed_mtp.cost.floor import floor_ms
from windowed_mtp.cost.geometry import Geometry
from windowed_mtp.cost.record import Rates
from windowed_mtp.cost.work import Work, draft_work, verify_work
from windowed_mtp.window import SinkWindow

FOLDER = Path(__file__).parents[2] / "benchmarks" / "geometries"
MILLION = 1_040_000
RATES = Rates(copy_bytes_per_s=4e12, matrix_ops_per_s={"bf16": 5e14, "fp8": 1e15})


def config(name: str = "Qwen3.6-35B-A3B", **changes: Any) -> dict[str, Any]:
    return {**json.loads((FOLDER / name / "config.json").read_text()), **changes}


@pytest.fixture(scope="module")
def qwen() -> Geometry:
    return read_geometry(FOLDER / "Qwen3.6-35B-A3B")


def parts(work: list[Work]) -> dict[str, Work]:
    named = {part.part: part for part in work}
    assert len(named) == len(work)
    return named


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3.6-35B-A3B", 34.66), ("Qwen3.5-122B-A10B-FP8", 122.1), ("Nemotron-3-Super-120B-A12B-FP8", 120.7),
        ("GLM-4.7-Flash", 29.94), ("GLM-4.5-Air", 106.9),
    ],
)  # fmt: skip
def test_geometries_have_the_size_that_their_names_say(name: str, billions: float):
    assert read_geometry(FOLDER / name).parameters == pytest.approx(billions * 1e9, rel=1e-3)


def test_every_geometry_is_tested():
    assert len([path for path in FOLDER.iterdir() if path.is_dir()]) == 5


def test_the_verify_pass_of_qwen_by_hand(qwen: Geometry):
    work = parts(verify_work(qwen, MILLION, 6))
    # 10 layers, 2 heads, keys and values of 256 in bf16: 20,480 bytes a token; 1,040,007 are read and 7 written
    assert work["attention over the cache"].bytes == (MILLION + 14) * 20_480
    assert work["attention over the cache"].bytes == pytest.approx(21.3e9, rel=1e-3)
    # 16 heads, 256 to score and 256 to sum, two operations each; query i sees 1,040,000 + i keys
    assert work["attention over the cache"].ops == 10 * 2 * 16 * 512 * (7 * MILLION + 28)
    assert work["attention projections"].bytes == 10 * 2 * 2048 * (2 * 16 * 256 + 2 * 2 * 256 + 16 * 256)
    # weights 33,718,272 in bf16; state 32 x 128 x 128 in float32 and 8192 x 3 in bf16, read and written
    assert work["recurrent layers"].bytes == 30 * (2 * 33_718_272 + 2 * (2_097_152 + 49_152))
    assert work["routed experts"].bytes == pytest.approx(40 * 51.01 * 3 * 2048 * 512 * 2, rel=1e-3)
    assert work["routed experts"].ops == 40 * 7 * 8 * 2 * 3 * 2048 * 512
    assert work["router and shared experts"].bytes == 40 * 2 * (2048 * 257 + 3 * 2048 * 512)
    assert work["output head"].bytes == 248_320 * 2048 * 2 == 1_017_118_720
    assert work["output head"].ops == 7 * 2 * 248_320 * 2048
    assert set(work) == {
        "attention over the cache", "attention projections", "recurrent layers", "routed experts",
        "router and shared experts", "output head",
    }  # fmt: skip


def test_the_output_head_takes_what_was_measured(qwen: Geometry):
    """0.235 ms a draft pass on a device that copies 4.33 TB/s."""
    head = parts(draft_work(qwen, 8192, 1))["output head"]
    assert floor_ms([head], RATES.model_copy(update={"copy_bytes_per_s": 4.33e12})) == pytest.approx(0.235, abs=1e-3)


def test_the_draft_of_qwen_by_hand(qwen: Geometry):
    native, windowed = (parts(draft_work(qwen, MILLION, 6, window=window)) for window in (None, SinkWindow()))
    cache = "attention over the cache"
    # one layer, 2048 bytes a token; a pass reads all before it and its own, and writes its own
    assert native[cache].bytes == 2048 * (MILLION + 7 + 7 + sum(MILLION + 7 + i + 1 for i in range(1, 6)))
    # 64 + 4032 keys, and 6 more for the first pass, whose first query bounds it
    assert windowed[cache].bytes == 2048 * (4096 + 6 + 7 + 5 * (4096 + 1))
    assert windowed[cache].ops == 2 * 16 * 512 * (7 * (4096 + 6 - 7) + 28 + 5 * 4096)
    for work in (native, windowed):
        assert work["output head"].bytes == 6 * 1_017_118_720
        assert work["output head"].ops == 6 * 2 * 248_320 * 2048
        assert work["dense layers"].bytes == 6 * 2 * 2 * 2048 * 2048
        assert work["routed experts"].bytes == pytest.approx((51.01 + 5 * 8) * 3 * 2048 * 512 * 2, rel=1e-3)
        assert work["attention projections"].bytes == 6 * 2 * 27_262_976


def test_a_window_that_does_not_engage_changes_nothing(qwen: Geometry):
    native = draft_work(qwen, 4000, 6)
    assert draft_work(qwen, 4000, 6, window=SinkWindow()) == native
    assert draft_work(qwen, MILLION, 6, window=SinkWindow(min_context=2 * MILLION)) == draft_work(qwen, MILLION, 6)
    near = draft_work(qwen, 4096, 6, window=SinkWindow())  # engages by a few keys less than the first pass adds
    assert sum(part.bytes for part in near) <= sum(part.bytes for part in draft_work(qwen, 4096, 6))


def test_a_hot_vocabulary_computes_its_rows_only(qwen: Geometry):
    hot = parts(draft_work(qwen, 8192, 6, head_rows=32_768))
    assert hot["output head"].bytes == 6 * 32_768 * 2048 * 2
    assert draft_work(qwen, 8192, 6, head_rows=10**9) == draft_work(qwen, 8192, 6)


def test_no_speculation_is_one_token_and_no_draft(qwen: Geometry):
    work = parts(verify_work(qwen, MILLION, 0))
    assert work["routed experts"].bytes == pytest.approx(40 * 8 * 3 * 2048 * 512 * 2)
    assert draft_work(qwen, MILLION, 0) == []


def test_batch_and_cache_type(qwen: Geometry):
    one, four, fp8 = (
        parts(verify_work(qwen, 131_072, 6, **how)) for how in ({}, {"batch": 4}, {"kv_dtype": "fp8"})
    )  # fmt: skip
    cache = "attention over the cache"
    assert four[cache].bytes == 4 * one[cache].bytes and four[cache].ops == 4 * one[cache].ops
    assert fp8[cache].bytes == one[cache].bytes / 2
    assert four["output head"].bytes == one["output head"].bytes
    assert four["routed experts"].bytes == pytest.approx(40 * qwen.target.experts[0].expected_distinct(28) * 6_291_456)
    states = 30 * 2 * 2_146_304
    assert four["recurrent layers"].bytes - one["recurrent layers"].bytes == 3 * states


def test_expected_distinct_experts_agrees_with_a_draw(qwen: Geometry):
    experts, generator = qwen.target.experts[0], random.Random(0)
    drawn = [len({e for _ in range(7) for e in generator.sample(range(256), 8)}) for _ in range(2000)]
    assert experts.expected_distinct(7) == pytest.approx(sum(drawn) / 2000, rel=0.01)
    assert experts.expected_distinct(1) == pytest.approx(8)


def test_devices_share_heads_and_experts_but_not_the_router():
    geometry = read_geometry(FOLDER / "Nemotron-3-Super-120B-A12B-FP8")

    def total(devices: int, part: str) -> float:
        return sum(w.bytes for w in verify_work(geometry, MILLION, 0, tensor_parallel=devices) if w.part == part)

    cache = total(1, "attention over the cache")
    assert cache == (MILLION + 2) * 8 * 2 * 2 * 128 * 2
    assert total(2, "attention over the cache") == cache / 2
    assert total(4, "attention over the cache") == cache / 2  # two heads: the other devices hold copies
    assert total(2, "routed experts") == total(1, "routed experts") / 2
    router, latent, shared = 2 * 4096 * 512, 2 * 2 * 4096 * 1024, 2 * 4096 * 5376
    assert total(2, "router and shared experts") == 40 * (router + latent + shared / 2)


def test_latent_attention_caches_one_vector_that_no_device_splits():
    geometry = read_geometry(FOLDER / "GLM-4.7-Flash")
    for devices in (1, 2):
        work = parts(verify_work(geometry, MILLION, 0, tensor_parallel=devices))["attention over the cache"]
        assert work.bytes == (MILLION + 2) * 47 * 576 * 2
        assert work.ops == 47 * 2 * 20 * (576 + 512) * (MILLION + 1) / devices


def test_fp8_halves_what_it_quantises():
    geometry = read_geometry(FOLDER / "Nemotron-3-Super-120B-A12B-FP8")
    verify = {(w.part, w.operands): w.bytes for w in verify_work(geometry, 8192, 0)}
    assert verify["routed experts", "fp8"] == pytest.approx(40 * 22 * 2 * 1024 * 2688)
    assert verify["attention projections", "bf16"] == 8 * 2 * 4096 * 128 * (2 * 32 + 2 * 2)
    # gate 8192, x 8192, B and C 2 x 8 x 128, dt 128
    assert verify["recurrent layers", "fp8"] == 40 * 4096 * (8192 + 8192 + 2048 + 128 + 8192)
    assert {w.operands for w in draft_work(geometry, 8192, 6)} == {"bf16"}
    qwen = geometry_of(config("Qwen3.5-122B-A10B-FP8"))
    plain = geometry_of(config("Qwen3.5-122B-A10B-FP8", quantization_config=None))
    narrow = 36 * 2 * 2 * 3072 * 64  # in_proj_b and in_proj_a keep bf16
    assert sum(w.bytes for w in verify_work(plain, 8192, 0) if w.part == "recurrent layers") == 36 * (
        2 * (3072 * 20_480 + 8192 * 3072 + 12_288 * 4) + 2 * (64 * 128 * 128 * 4 + 12_288 * 3 * 2)
    ) + narrow  # fmt: skip
    assert sum(w.bytes for w in verify_work(qwen, 8192, 0) if w.part == "recurrent layers") == 36 * (
        3072 * 20_480 + 8192 * 3072 + 2 * 12_288 * 4 + 2 * (64 * 128 * 128 * 4 + 12_288 * 3 * 2)
    ) + narrow  # fmt: skip


def test_a_nested_language_model_is_found():
    flat = config()
    nested = {"model_type": "qwen3_5_moe", "text_config": flat}
    assert geometry_of(nested) == geometry_of(flat)
    listed = {key: value for key, value in flat.items() if key != "full_attention_interval"}
    types = ["linear_attention"] * 33 + ["full_attention"] * 7
    assert len(geometry_of({**listed, "layer_types": types}).target.attention) == 7


def test_the_floor_is_the_larger_of_the_two():
    assert floor_ms([Work("a", 4e9, 1e9), Work("b", 4e9, 1e9)], RATES) == pytest.approx(2.0)
    assert floor_ms([Work("a", 1e6, 1e12), Work("b", 0, 1e12, "fp8")], RATES) == pytest.approx(2.0 + 1.0)
    with pytest.raises(GeometryError, match="fp8"):
        floor_ms([Work("a", 1.0, 1.0, "fp8")], Rates(copy_bytes_per_s=1.0, matrix_ops_per_s={"bf16": 1.0}))


@pytest.mark.parametrize("text", [None, "not json", "[]", '{"model_type": "gpt2"}', "{}", '{"model_type": "glm4_moe"}'])
def test_what_is_no_config_is_refused_in_one_sentence(text: str | None, tmp_path: Path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(GeometryError, match=r"^[^\n]*\.$"):
        read_geometry(tmp_path)
