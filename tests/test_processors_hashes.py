"""Caller hashes: low 64 bits, and whatever is wrong with them is a warning and never a rejection."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastmm.processors import Processed, ProcessedItem, Work, apply_caller_hashes, caller_hash


def processed(n: int) -> Processed:
    items = [
        ProcessedItem(modality="image", features={"x": np.zeros(1, np.float32)}, hash=f"computed-{i}", placeholder=(i, 1))
        for i in range(n)
    ]
    return Processed(prompt_token_ids=list(range(n + 1)), items=items)


def hashed(hashes: object, n: int = 2) -> list[str]:
    work = Work(request_id="r", images=[b"x"] * n, hashes=hashes)  # type: ignore[arg-type]
    return [item.hash for item in apply_caller_hashes(work, processed(n)).items]


@pytest.mark.parametrize(
    ("given_hash", "kept"),
    [
        ("0", "0000000000000000"),
        ("0x0", "0000000000000000"),
        ("abc", "0000000000000abc"),
        ("0XABC", "0000000000000abc"),
        ("ffffffffffffffff", "ffffffffffffffff"),
        ("1ffffffffffffffff", "ffffffffffffffff"),
        ("0x" + "12" * 32, "1212121212121212"),
        ("f" * 1_000_001, "ffffffffffffffff"),
        ("00000000000000000000000000000001", "0000000000000001"),
    ],
)
def test_hex_of_any_width_is_kept_by_its_low_64_bits(given_hash, kept):
    assert caller_hash(given_hash) == kept
    assert hashed([given_hash, "0x7"]) == [kept, "0000000000000007"]


@given(st.integers(0, 1 << 300), st.sampled_from(["{:x}", "0x{:x}", "{:X}", "0X{:X}", "{:080x}"]))
def test_it_is_the_number_modulo_two_to_the_64(number, form):
    assert int(caller_hash(form.format(number)), 16) == number % (1 << 64)


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "0x",
        "x",
        "xyz",
        "0x12g",
        "1_000",
        " 1",
        "1 ",
        "+1",
        "-1",
        "0x0x1",
        "\u0661",
        "12\n",
        None,
        1,
        1.0,
        True,
        b"ab",
        [],
        {},
    ],
)
def test_a_malformed_one_warns_and_keeps_the_computed_one(bad, caplog):
    assert caller_hash(bad) is None
    with caplog.at_level(logging.WARNING, "fastmm.processors"):
        assert hashed([bad, "f"]) == ["computed-0", "000000000000000f"]
    (record,) = caplog.records
    assert "item 0" in record.getMessage()


@pytest.mark.parametrize("n_hashes", [1, 3])
def test_a_wrong_count_warns_and_changes_nothing(n_hashes, caplog):
    with caplog.at_level(logging.WARNING, "fastmm.processors"):
        assert hashed(["1"] * n_hashes) == ["computed-0", "computed-1"]
    (record,) = caplog.records
    assert f"{n_hashes} hashes for 2 media" in record.getMessage()


@pytest.mark.parametrize("hashes", [[], (), None])
def test_an_empty_list_changes_nothing_without_a_word(hashes, caplog):
    work = Work(request_id="r", images=[b"x"] * 2, hashes=hashes)
    result = processed(2)
    with caplog.at_level(logging.DEBUG):
        assert apply_caller_hashes(work, result) is result
    assert not caplog.records


@pytest.mark.parametrize("hashes", ["ab", 3, {"0": "1"}, b"ab", object()])
def test_what_is_no_list_warns_and_changes_nothing(hashes, caplog):
    with caplog.at_level(logging.WARNING, "fastmm.processors"):
        assert hashed(hashes) == ["computed-0", "computed-1"]
    assert len(caplog.records) == 1


def test_a_warning_never_repeats_a_callers_hash(caplog):
    with caplog.at_level(logging.WARNING, "fastmm.processors"):
        hashed(["secret" * 1000, "1"])
    assert "secret" not in caplog.text


def test_what_a_processor_returned_is_not_written_to():
    result = processed(1)
    apply_caller_hashes(Work(request_id="r", images=[b"x"], hashes=["1"]), result)
    assert result.items[0].hash == "computed-0"


def test_items_made_of_extensions_keep_their_hashes():
    work = Work(request_id="r", images=[b"x"], hashes=["1"])
    assert [item.hash for item in apply_caller_hashes(work, processed(2)).items] == ["0000000000000001", "computed-1"]
