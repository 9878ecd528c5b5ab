"""A graph as data: nodes, what they take and give, and the edges between. It checks itself when it is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from nodes.catalog import NODES

REQUEST = "request"


class GraphError(ValueError):
    """A graph that cannot be run; the message names the node or the edge."""


@dataclass(frozen=True)
class NodeSpec:
    """One step of a graph.

    Attributes:
        name: Unique within the graph.
        kind: Which node runs it; a key of `nodes.catalog.NODES`.
        method: Of that node.
        takes: Input names and their types.
        gives: Type of the result; of several results, their names and types.
        streaming: The method reports on its way (denoise).
    """

    name: str
    kind: str
    method: str
    takes: Mapping[str, str] = field(default_factory=dict)
    gives: str | Mapping[str, str] = ""
    streaming: bool = False

    @property
    def outputs(self) -> dict[str, str]:
        """What edges may come from, and its type: the node, or `node.name` for each of several results."""
        if isinstance(self.gives, str):
            return {self.name: self.gives}
        return {f"{self.name}.{name}": type_ for name, type_ in self.gives.items()}


@dataclass(frozen=True)
class Edge:
    """The result of `source` is the input `port` of `target`. The source `request.X` comes with the request."""

    source: str
    target: str
    port: str


@dataclass(frozen=True)
class Graph:
    """What a mode runs. Immutable, and valid if it exists.

    Attributes:
        name: Of the mode.
        nodes: In any order.
        edges: Between them, and from the request.
        results: What comes back, and which output it is.
        request_types: What may come with the request: conditioning frames, given actions.
    """

    name: str
    nodes: tuple[NodeSpec, ...]
    edges: tuple[Edge, ...]
    results: Mapping[str, str]
    request_types: Mapping[str, str] = field(
        default_factory=lambda: MappingProxyType({"frames": "frames", "actions": "actions"})
    )

    def __post_init__(self) -> None:
        """Check the graph.

        Raises:
            GraphError: a name used twice, a kind of node that there is not, an edge from or to an unknown node, an
                unknown or doubly fed port, an input that nothing feeds, types that do not match, a result that
                nothing gives, an output that nobody wants, or a cycle.
        """
        names = [node.name for node in self.nodes]
        if len(set(names)) != len(names):
            raise GraphError(f"graph {self.name}: a node name is used twice in {names}")
        for node in self.nodes:
            if node.kind not in NODES:
                raise GraphError(f"graph {self.name}: {node.name} is of unknown kind {node.kind!r}")
        fed: set[tuple[str, str]] = set()
        for edge in self.edges:
            self._check_edge(edge)
            if (edge.target, edge.port) in fed:
                raise GraphError(f"graph {self.name}: input {edge.target}.{edge.port} is fed twice")
            fed.add((edge.target, edge.port))
        for node in self.nodes:
            for port in node.takes:
                if (node.name, port) not in fed:
                    raise GraphError(f"graph {self.name}: input {node.name}.{port} is not connected")
        for name, source in self.results.items():
            if self._type_of(source) is None:
                raise GraphError(f"graph {self.name}: result {name} comes from unknown node {source!r}")
        wanted = {edge.source for edge in self.edges} | set(self.results.values())
        for node in self.nodes:
            for output in node.outputs:
                if output not in wanted:
                    raise GraphError(f"graph {self.name}: nobody wants {output}")
        self.order()

    def _check_edge(self, edge: Edge) -> None:
        target = self.find(edge.target)
        if target is None:
            raise GraphError(f"graph {self.name}: an edge leads to unknown node {edge.target!r}")
        if edge.port not in target.takes:
            raise GraphError(f"graph {self.name}: node {edge.target} has no input {edge.port!r}")
        given = self._type_of(edge.source)
        if given is None:
            raise GraphError(f"graph {self.name}: an edge comes from unknown node {edge.source!r}")
        if given != target.takes[edge.port]:
            raise GraphError(
                f"graph {self.name}: {edge.source} gives {given}, but {edge.target}.{edge.port} takes "
                f"{target.takes[edge.port]}"
            )

    def _type_of(self, source: str) -> str | None:
        scope, _, name = source.partition(".")
        if scope == REQUEST and name:
            return self.request_types.get(name)
        return next((node.outputs[source] for node in self.nodes if source in node.outputs), None)

    def find(self, name: str) -> NodeSpec | None:
        return next((node for node in self.nodes if node.name == name), None)

    def inputs(self, node: NodeSpec) -> dict[str, str]:
        """Port to source, for every input of a node."""
        return {edge.port: edge.source for edge in self.edges if edge.target == node.name}

    def order(self) -> list[NodeSpec]:
        """The nodes so that each comes after what feeds it.

        Raises:
            GraphError: there is a cycle; the message names its nodes.
        """
        placed: list[NodeSpec] = []
        left = list(self.nodes)
        while left:
            waiting = {output for node in left for output in node.outputs}
            ready = [node for node in left if waiting.isdisjoint(self.inputs(node).values())]
            if not ready:
                names = sorted(node.name for node in left)
                raise GraphError(f"graph {self.name}: cycle among {', '.join(names)}")
            placed += ready
            left = [node for node in left if node not in ready]
        return placed

    def without(self, name: str, results: Mapping[str, str]) -> Graph:
        """This graph without a node and whatever fed it alone, and with these results."""
        edges = tuple(edge for edge in self.edges if edge.target != name)
        wanted = {edge.source for edge in edges} | set(results.values())
        nodes = []
        for node in self.nodes:
            gives = node.gives
            if not isinstance(gives, str):
                gives = {key: type_ for key, type_ in gives.items() if f"{node.name}.{key}" in wanted}
            if node.name != name:
                nodes.append(replace(node, gives=gives))
        return Graph(self.name, tuple(nodes), edges, results, self.request_types)

    def kinds(self) -> set[str]:
        return {node.kind for node in self.nodes}

    def to_text(self) -> str:
        """One line a node, in order: what it takes and what it gives; at the end what comes back."""
        lines = [f"{self.name}"]
        for node in self.order():
            takes = ", ".join(f"{port}={source}" for port, source in self.inputs(node).items()) or REQUEST
            gives = ", ".join(node.outputs.values())
            lines.append(f"  {node.name:<13} {node.kind + '.' + node.method:<22} ({takes}) -> {gives}")
        results = ", ".join(f"{name}={source}" for name, source in self.results.items())
        lines.append(f"  {'result':<13} ({results})")
        return "\n".join(lines)

    def to_mermaid(self) -> str:
        """A Mermaid flowchart; edges carry the type that travels."""
        lines = ["flowchart LR", f"  {REQUEST}([{REQUEST}])"]
        lines += [f"  {node.name}[{node.kind}<br/>{node.method}]" for node in self.order()]
        for node in self.order():
            sources = self.inputs(node)
            if not sources:
                lines.append(f"  {REQUEST} --> {node.name}")
            for port, source in sources.items():
                lines.append(f"  {source.partition('.')[0]} -- {node.takes[port]} --> {node.name}")
        lines += [
            f"  {source.partition('.')[0]} -- {name} --> result([result])" for name, source in self.results.items()
        ]
        return "\n".join(lines)
