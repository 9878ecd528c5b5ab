"""Actions go out and come in again exactly, in every form; what is no table of numbers says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from nodes.action_files import SUFFIXES, encode_actions, load_actions
from nodes.media import MediaError

ACTIONS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_written_reads_back_exactly(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"actions{suffix}"
    file.write_bytes(encode_actions(ACTIONS, "umi", suffix))
    for source in (file, str(file)):
        loaded = load_actions(source)
        assert loaded.dtype == np.float32
        assert np.array_equal(loaded, ACTIONS)


def test_files_are_what_they_are_called_and_name_the_domain() -> None:
    for parse, suffix in ((json.loads, ".json"), (msgpack.unpackb, ".msgpack")):
        values = parse(encode_actions(ACTIONS, "umi", suffix))
        assert values["domain_name"] == "umi"
        assert np.array_equal(np.float32(values["actions"]), ACTIONS)
    with pytest.raises(MediaError, match=r"actions go into .json, .npy, .msgpack files, not '.csv'"):
        encode_actions(ACTIONS, "umi", ".csv")


@pytest.mark.parametrize("source", [ACTIONS, ACTIONS.tolist(), {"actions": ACTIONS.tolist()}, ACTIONS.astype("f8")])
def test_arrays_lists_and_maps_are_actions(source: Any) -> None:
    assert np.array_equal(load_actions(source), ACTIONS)


def test_a_bare_table_in_a_file_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[[1, 2], [3, 4]]")
    assert load_actions(tmp_path / "a.json").tolist() == [[1, 2], [3, 4]]
    (tmp_path / "b.MSGPACK").write_bytes(msgpack.packb([[1, 2.5]]))
    assert load_actions(tmp_path / "b.MSGPACK").tolist() == [[1, 2.5]]


BAD = [
    ("a.json", b"[[1, 2], [3]]", "not a table of numbers"),
    ("a.json", b"[1, 2]", r"must be \[T, D\]"),
    ("a.json", b"[]", r"must be \[T, D\]"),
    ("a.json", b"[[]]", r"must be \[T, D\]"),
    ("a.json", b'[["x"]]', "not a table of numbers"),
    ("a.json", b"[[1, NaN]]", "not finite"),
    ("a.json", b"[[1e300]]", "not finite"),
    ("a.json", b'{"rows": [[1]]}', "a map without the key 'actions'"),
    ("a.json", b"[[1,", "not a .json file"),
    ("a.json", b"\xff\xfe", "not a .json file"),
    ("a.npy", b"not numpy", "not a .npy file"),
    ("a.npy", np.lib.format.magic(1, 0) + b"\x10\x00", "not a .npy file"),
    ("a.msgpack", b"\xc1", "not a .msgpack file"),
    ("a.csv", b"1,2", "suffix '.csv' is not one of .json, .npy, .msgpack"),
    ("a.json", None, "no such file"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD)
def test_what_is_no_table_of_numbers_is_refused_by_name(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(MediaError, match=message) as caught:
        load_actions(tmp_path / name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "evil.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(MediaError, match=r"evil.npy: not a .npy file"):
        load_actions(tmp_path / "evil.npy")
