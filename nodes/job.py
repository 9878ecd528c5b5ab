"""What nodes are told about a request, and how they are set up. Frozen, with nothing left open."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch

from cosmos3_model.conditioning import Conditioning
from cosmos3_model.prompts import PromptSettings
from cosmos3_model.sampling import SamplingSettings

OutputFormat = Literal["np", "npy", "png", "jpeg", "webp", "png_frames", "mp4", "latent", "actions"]
Batching = Literal["exact", "joint"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class NodeError(RuntimeError):
    """A request that failed inside a node; the message says which node and why, in one line."""


class DeadlineExceeded(NodeError):
    """The request's time was up before it was done."""


class RequestCancelled(NodeError):
    """Somebody cancelled the request."""


@dataclass(frozen=True)
class Job:
    """One request with every setting resolved.

    Attributes:
        request_id: Also the name under which it leases K/V.
        mode: Name of the graph that it walks.
        prompt: For the encoder.
        sampling: For the denoise node.
        output: What the VAE-decode node makes of the frames.
        conditioning: What the encoder makes of the frames that were given, or None.
        deadline: `time.time()` after which the request is given up, or None.
    """

    request_id: str
    mode: str
    prompt: PromptSettings
    sampling: SamplingSettings
    output: OutputFormat
    conditioning: Conditioning | None = None
    deadline: float | None = None

    def check_deadline(self, where: str) -> None:
        """Raise `DeadlineExceeded` if the request's time is up."""
        if self.deadline is not None and time.time() > self.deadline:
            raise DeadlineExceeded(f"request {self.request_id} ran out of time in {where}")


@dataclass(frozen=True)
class NodeSettings:
    """How a node is built.

    Attributes:
        snapshot: Folder of the checkpoint.
        device: "cpu" or "cuda".
        dtype: A key of `DTYPES`.
        threads: CPU threads of its compute; results may depend on it in the last bit.
        attention: Name of the attention backend.
        batching: "exact" runs one branch of one request per forward, bit for bit as if it were alone; "joint" packs
            all of them into one forward, which is faster on a GPU and equal within 1e-5 in float32.
        max_batch_tokens: Generation tokens in one joint forward, at most; a larger request still runs, alone.
        save_every: Steps between two saved states of a request, from which it can go on elsewhere.
        share_pool: False copies K/V instead of mapping the store's pool.
    """

    snapshot: str
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    attention: str = "sdpa"
    batching: Batching = "exact"
    max_batch_tokens: int = 65536
    save_every: int = 5
    share_pool: bool = True

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]
