"""How many of which node run where: one YAML file, with a default for the machine at hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nodes.catalog import NODES
from nodes.job import Batching, NodeSettings


class PlacementError(ValueError):
    """A placement file that cannot be used; the message names the entry."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NodePlacement(_Strict):
    """One kind of node.

    Attributes:
        replicas: Actors of this kind.
        device: "cpu" or "cuda".
        dtype: Of weights and activations; "auto" is bfloat16 on a GPU and float32 on the CPU.
        threads: CPU threads of each.
        num_cpus: What Ray reserves for each. 0 starts it whatever else runs.
        num_gpus: What Ray reserves for each; a fraction shares a GPU.
        attention: Attention backend.
        batching: "exact", "joint", or "auto": joint on a GPU, exact on the CPU (`nodes.job.NodeSettings`).
        max_batch_tokens: `nodes.job.NodeSettings`.
        save_every: Likewise.
        share_pool: Likewise.
    """

    replicas: Annotated[int, Field(ge=1, le=256)] = 1
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    num_cpus: Annotated[float, Field(ge=0)] = 0
    num_gpus: Annotated[float, Field(ge=0)] = 0
    attention: str = "sdpa"
    batching: Literal["auto", "exact", "joint"] = "auto"
    max_batch_tokens: Annotated[int, Field(ge=1)] = 65536
    save_every: Annotated[int, Field(ge=1)] = 5
    share_pool: bool = True

    @property
    def resolved_dtype(self) -> str:
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if self.device == "cuda" else "float32"

    def settings(self, snapshot: str | Path) -> NodeSettings:
        """What the node itself is told."""
        batching: Batching = "joint" if self.device == "cuda" else "exact"
        return NodeSettings(
            str(Path(snapshot).resolve()),
            self.device,
            self.resolved_dtype,
            self.threads,
            self.attention,
            batching if self.batching == "auto" else self.batching,
            self.max_batch_tokens,
            self.save_every,
            self.share_pool,
        )


class StorePlacement(_Strict):
    """The K/V store: how many tokens of text it holds, in pages of how many, and how long a lease lasts."""

    pool_tokens: Annotated[int, Field(ge=16)] = 16384
    page_size: Annotated[int, Field(ge=1, le=1024)] = 16
    lease_seconds: Annotated[float, Field(gt=0)] = 10.0


class Limits(_Strict):
    """Bounds on what is accepted and on how long things may take.

    Attributes:
        max_in_flight: Requests that run at a time, exactly.
        max_queued: Requests that wait beyond those; one more is refused.
        start_seconds: For an actor to load and warm up.
        heartbeat_seconds: Without an answer for this long an actor is taken for dead.
        max_attempts: Of one node at one request, when actors die under it.
    """

    max_in_flight: Annotated[int, Field(ge=1)] = 16
    max_queued: Annotated[int, Field(ge=0)] = 1024
    start_seconds: Annotated[float, Field(gt=0)] = 600.0
    heartbeat_seconds: Annotated[float, Field(gt=0)] = 10.0
    max_attempts: Annotated[int, Field(ge=1)] = 4


class Placement(_Strict):
    """The whole plan. Kinds of node that are not named get the defaults of `NodePlacement`."""

    nodes: dict[str, NodePlacement] = Field(default_factory=dict)
    store: StorePlacement = StorePlacement()
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _known(self) -> Placement:
        for kind in self.nodes:
            if kind not in NODES:
                raise ValueError(f"nodes.{kind}: unknown node; there are {', '.join(NODES)}")
        dtypes = {self.node(kind).resolved_dtype for kind in ("prefill", "denoise")}
        if len(dtypes) > 1:
            raise ValueError("nodes.prefill.dtype and nodes.denoise.dtype must be the same: they share K/V")
        return self

    def node(self, kind: str) -> NodePlacement:
        return self.nodes.get(kind, NodePlacement())

    @classmethod
    def default(cls, num_gpus: int = 0) -> Placement:
        """For a machine with no GPU, one, or several: one denoise worker a GPU, the others share the first."""
        if num_gpus == 0:
            return cls()
        shared = NodePlacement(device="cuda", num_gpus=0.05)
        denoise = NodePlacement(device="cuda", num_gpus=0.8, replicas=num_gpus)
        return cls(nodes=dict.fromkeys(NODES, shared) | {"denoise": denoise})

    @classmethod
    def from_yaml(cls, path: str | Path) -> Placement:
        """Read a placement file.

        Raises:
            PlacementError: it is not there, not YAML, or has an entry that is wrong or unknown.
        """
        try:
            values: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
            return cls.model_validate(values or {})
        except OSError as error:
            raise PlacementError(f"{path}: {os.strerror(error.errno or 0)}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise PlacementError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            message = first["msg"].removeprefix("Value error, ")
            raise PlacementError(f"{path}: {where + ': ' if where else ''}{message}") from None
