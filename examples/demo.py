"""`make demo`: a picture, a clip with sound and a robot's actions through the actors, each against the fused run."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cosmos3_model.fused import FusedOutput
from cosmos3_model.snapshot import write_snapshot
from graph.modes import MODES
from graph.pipeline import Pipeline
from graph.reference import ReferencePipeline
from graph.result import GenerationResult
from nodes.media import encode_frames, mux_sound

OUT = Path("out")
COMMON = {"negative_prompt": "blurry, dark", "num_inference_steps": 12, "seed": 7}
SIZE = {"height": 96, "width": 160}
POLICY = {"mode": "policy", "domain_name": "pusht", "chunk_size": 16, "resolution_tier": 256}
SCENE = np.random.default_rng(0).integers(0, 256, (96, 96, 3), dtype=np.uint8)
REQUESTS: dict[Path, dict[str, Any]] = {
    OUT / "demo.png": {"prompt": "A red cube on a table.", "num_frames": 1, **SIZE, **COMMON},
    OUT / "demo.mp4": {
        "prompt": "A red cube turns, humming.",
        "num_frames": 17,
        "enable_sound": True,
        **SIZE,
        **COMMON,
    },
    OUT / "demo.json": {"prompt": "Push the cube.", "image": SCENE, "action": POLICY, **COMMON},
}


def save(result: GenerationResult, path: Path) -> None:
    """A policy's actions, or the picture or clip."""
    if path.suffix == ".json":
        result.save_actions(path)
    else:
        result.save(path)


def exact(result: GenerationResult, expected: FusedOutput, rate: int) -> bool:
    """Whether the pipeline gave the bytes that the single-process run gives."""
    if result.actions is not None and expected.actions is not None:
        same_clip = np.array_equal(result.media, expected.frames)
        return same_clip and np.array_equal(result.actions, expected.actions.numpy())
    media = encode_frames(expected.frames, result.output, fps=24.0)
    if expected.sound is not None:
        length = round(len(expected.frames) / 24.0 * rate)
        media = mux_sound(media, expected.sound.numpy()[:, :length], rate)
    return media == result.media


def show(path: Path, result: GenerationResult, same: bool, pages: int) -> None:
    print(f"\n{path}: {path.stat().st_size} bytes, {result.metadata['seconds']:.2f} s")
    print(MODES[result.mode].to_text())
    for timing in result.timings:
        print(f"    {timing.node:<13} {timing.seconds * 1000:8.1f} ms  process {timing.pid}")
    print(f"  pages in use after: {pages}")
    print(f"  against the fused run: {'bit-exact' if same else 'DIFFERENT'}")


def main() -> None:
    torch.set_num_threads(1)  # as in the nodes: sums may differ in the last bit with another number
    with tempfile.TemporaryDirectory() as folder:
        snapshot = write_snapshot(Path(folder) / "nano-tiny")
        print("starting Ray and five model nodes (encoder, prefill, denoise, vae_decode, sound_decode) ...", flush=True)
        started = time.perf_counter()
        with Pipeline.launch(snapshot) as pipeline:
            print(f"ready after {time.perf_counter() - started:.1f} s")
            reference = ReferencePipeline(snapshot)
            all_exact = True
            for path, request in REQUESTS.items():
                output = "np" if path.suffix == ".json" else path.suffix.removeprefix(".")
                result = pipeline.generate(output=output, **request)
                save(result, path)
                same = exact(result, reference(**request), reference.snapshot.sampling_rate)
                show(path, result, same, pipeline.stats()["store"]["pages_in_use"])
                all_exact &= same
    if not all_exact:
        raise SystemExit("the pipeline's result differs from the fused run's")


if __name__ == "__main__":
    main()
