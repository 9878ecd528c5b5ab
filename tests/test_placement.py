"""The placement file: read strictly, with defaults for the machine at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from graph.placement import Placement, PlacementError
from nodes.catalog import NODES

BAD = {
    "nodes: {denoise: {replica: 2}}": r"nodes.denoise.replica: Extra inputs",
    "nodes: {denoise: {replicas: 0}}": r"nodes.denoise.replicas: Input should be greater",
    "nodes: {dreamer: {}}": r"nodes.dreamer: unknown node; there are encoder, prefill",
    "nodes: {denoise: {dtype: bfloat16}}": r"must be the same: they share K/V",
    "nodes: {denoise: {device: tpu}}": r"nodes.denoise.device",
    "store: {pool_tokens: -1}": r"store.pool_tokens",
    "color: red": r"color: Extra inputs",
    "nodes: [": r"not YAML",
    "- a": r"valid dictionary",
}


@pytest.mark.parametrize("text", BAD)
def test_it_is_refused_by_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "placement.yaml"
    file.write_text(text)
    with pytest.raises(PlacementError, match=BAD[text]) as caught:
        Placement.from_yaml(file)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match=r"absent\.yaml: No such file"):
        Placement.from_yaml(tmp_path / "absent.yaml")


def test_the_file_in_the_repository_is_valid() -> None:
    placement = Placement.from_yaml(Path(__file__).parents[1] / "examples" / "placement.yaml")
    assert placement.node("denoise").replicas == 2


def test_defaults_follow_the_machine() -> None:
    nothing, one, four = (Placement.default(gpus) for gpus in (0, 1, 4))
    assert nothing.node("denoise").device == "cpu"
    assert nothing.node("denoise").settings("x").batching == "exact"
    assert nothing.node("denoise").settings("x").dtype == "float32"
    assert one.node("denoise").device == "cuda"
    assert one.node("denoise").settings("x").batching == "joint"
    assert one.node("prefill").settings("x").dtype == "bfloat16"
    assert sum(one.node(kind).num_gpus for kind in NODES) <= 1
    assert four.node("denoise").replicas == 4
