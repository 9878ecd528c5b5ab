"""Graphs that cannot be run are refused when they are built; those that can print themselves."""

from __future__ import annotations

from typing import Any

import pytest

from graph.modes import MODES
from graph.spec import Edge, Graph, GraphError, NodeSpec
from nodes.catalog import NODES, build_node

A = NodeSpec("a", "encoder", "encode_text", {}, "ids")
B = NodeSpec("b", "prefill", "prefill", {"ids": "ids"}, "handles")
C = NodeSpec("c", "denoise", "denoise", {"handles": "handles"}, "latents")
D = NodeSpec("d", "prefill", "prefill", {}, {"left": "handles", "right": "handles"})
EDGES = (Edge("a", "b", "ids"), Edge("b", "c", "handles"))

BROKEN: list[tuple[str, tuple[NodeSpec, ...], tuple[Edge, ...], str]] = [
    (
        "cycle",
        (NodeSpec("x", "encoder", "m", {"i": "t"}, "t"), NodeSpec("y", "encoder", "m", {"i": "t"}, "t")),
        (Edge("x", "y", "i"), Edge("y", "x", "i")),
        "cycle among x, y",
    ),
    ("self", (NodeSpec("x", "encoder", "m", {"i": "t"}, "t"),), (Edge("x", "x", "i"),), "cycle among x"),
    ("unknown source", (A, B, C), (*EDGES[:1], Edge("z", "c", "handles")), "from unknown node 'z'"),
    ("unknown target", (A, B, C), (*EDGES, Edge("a", "z", "ids")), "to unknown node 'z'"),
    ("unknown kind", (A, NodeSpec("b", "teleport", "m")), (), "b is of unknown kind 'teleport'"),
    ("unconnected", (A, B, C), EDGES[:1], "input c.handles is not connected"),
    ("unknown port", (A, B, C), (*EDGES, Edge("a", "c", "image")), "node c has no input 'image'"),
    ("fed twice", (A, B, C), (*EDGES, Edge("a", "b", "ids")), "input b.ids is fed twice"),
    ("type", (A, B, C), (EDGES[0], Edge("a", "c", "handles")), "a gives ids, but c.handles takes handles"),
    ("twice", (A, A), (), "used twice"),
    ("unknown field", (A, B), (Edge("request.sound", "b", "ids"),), "from unknown node 'request.sound'"),
    ("unwanted", (A, D, C), (Edge("d.left", "c", "handles"),), "nobody wants a"),
    ("unwanted output", (D, C), (Edge("d.left", "c", "handles"),), "nobody wants d.right"),
    ("whole of several", (D, C), (Edge("d", "c", "handles"),), "from unknown node 'd'"),
]


@pytest.mark.parametrize(("name", "nodes", "edges", "message"), BROKEN, ids=[case[0] for case in BROKEN])
def test_it_is_refused_when_built(name: str, nodes: Any, edges: Any, message: str) -> None:
    with pytest.raises(GraphError, match=f"graph {name}: .*{message}"):
        Graph(name, nodes, edges, {"media": nodes[-1].name})


def test_a_result_that_nothing_gives_is_refused() -> None:
    with pytest.raises(GraphError, match="result media comes from unknown node 'z'"):
        Graph("g", (A, B, C), EDGES, {"media": "z"})


def test_a_node_can_be_left_out_with_what_fed_it_alone() -> None:
    policy = MODES["policy"].without("decode", {"actions": "denoise.action"})
    assert [node.name for node in policy.order()] == ["encode_text", "encode_vision", "prefill", "denoise"]
    denoise = policy.find("denoise")
    assert denoise is not None
    assert list(denoise.outputs) == ["denoise.action"]


@pytest.mark.parametrize("mode", MODES)
def test_modes_name_methods_that_there_are(mode: str) -> None:
    import importlib

    for node in MODES[mode].nodes:
        module, name = NODES[node.kind].split(":")
        built = getattr(importlib.import_module(module), name)
        assert node.streaming or hasattr(built, node.method), node
        assert built.kind == node.kind
    assert callable(build_node)


def test_prefill_and_vision_encoding_do_not_wait_for_each_other() -> None:
    graph = MODES["image-to-video"]
    names = [node.name for node in graph.order()]
    assert names.index("encode_vision") < names.index("denoise")
    prefill = graph.find("prefill")
    assert prefill is not None
    assert graph.inputs(prefill) == {"ids": "encode_text"}


def test_a_graph_prints_itself() -> None:
    graph = MODES["image-to-video"]
    text = graph.to_text()
    assert "denoise       denoise.denoise        (handles=prefill, anchor=encode_vision) -> latents" in text
    assert text.endswith("result        (media=decode)")
    mermaid = graph.to_mermaid()
    assert mermaid.startswith("flowchart LR")
    for line in (
        "request -- frames --> encode_vision",
        "prefill -- kv_handles --> denoise",
        "decode -- media --> result([result])",
    ):
        assert f"  {line}" in mermaid
