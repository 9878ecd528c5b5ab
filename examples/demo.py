"""`make demo`: a picture and a clip through the actors, compared with the single-process run."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from cosmos3_model.fused import FusedPipeline
from cosmos3_model.snapshot import write_snapshot
from graph.modes import MODES
from graph.pipeline import Pipeline
from graph.result import GenerationResult
from nodes.media import encode_frames

OUT = Path("out")
COMMON = {"negative_prompt": "blurry, dark", "height": 96, "width": 160, "seed": 7}
REQUESTS = {
    OUT / "demo.png": {"prompt": "A red cube on a table.", "num_frames": 1, "num_inference_steps": 12, **COMMON},
    OUT / "demo.mp4": {"prompt": "A red cube turns.", "num_frames": 17, "num_inference_steps": 12, **COMMON},
}


def show(path: Path, result: GenerationResult, exact: bool, pages: int) -> None:
    print(f"\n{path}: {len(result.media)} bytes, {result.metadata['seconds']:.2f} s")
    print(MODES[result.mode].to_text())
    for timing in result.timings:
        print(f"    {timing.node:<13} {timing.seconds * 1000:8.1f} ms  process {timing.pid}")
    print(f"  pages in use after: {pages}")
    print(f"  against the fused run: {'bit-exact' if exact else 'DIFFERENT'}")


def main() -> None:
    torch.set_num_threads(1)  # as in the nodes: sums may differ in the last bit with another number
    with tempfile.TemporaryDirectory() as folder:
        snapshot = write_snapshot(Path(folder) / "nano-tiny")
        print("starting Ray and four model nodes (encoder, prefill, denoise, vae_decode) ...", flush=True)
        started = time.perf_counter()
        with Pipeline.launch(snapshot) as pipeline:
            print(f"ready after {time.perf_counter() - started:.1f} s")
            fused = FusedPipeline(snapshot)
            all_exact = True
            for path, request in REQUESTS.items():
                output = path.suffix.removeprefix(".")
                result = pipeline.generate(output=output, **request)
                result.save(path)
                frames: np.ndarray = fused(**request).frames
                exact = encode_frames(frames, output, fps=24.0) == result.media
                show(path, result, exact, pipeline.stats()["store"]["pages_in_use"])
                all_exact &= exact
    if not all_exact:
        raise SystemExit("the pipeline's result differs from the fused run's")


if __name__ == "__main__":
    main()
