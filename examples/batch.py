"""Eight requests of mixed sizes, submitted at once and saved as they finish.

python examples/batch.py --model out/tiny --out out/batch
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from graph.pipeline import PendingGeneration, Pipeline

REQUESTS = [
    {"prompt": "A red cube.", "num_frames": 1, "height": 64, "width": 96},
    {"prompt": "A blue ball.", "num_frames": 1, "height": 48, "width": 80},
    {"prompt": "A green cone.", "num_frames": 5, "height": 64, "width": 64},
    {"prompt": "A kitchen.", "num_frames": 1, "height": 128, "width": 64, "guidance_scale": 1.0},
    {"prompt": "Rain on glass.", "num_frames": 9, "height": 48, "width": 80, "num_inference_steps": 6},
    {"prompt": "A robot arm.", "num_frames": 17, "height": 64, "width": 96, "flow_shift": 10.0},
    {"prompt": "A red cube.", "num_frames": 1, "height": 64, "width": 96, "seed": 5},
    {"prompt": "A street at night.", "num_frames": 1, "height": 96, "width": 160, "guidance_scale": 3.5},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="snapshot folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    args = parser.parse_args()

    with Pipeline.launch(args.model) as pipeline, ThreadPoolExecutor(len(REQUESTS)) as pool:

        def save(index: int, pending: PendingGeneration) -> str:
            result = pending.result(timeout=600)
            path = result.save(args.out / f"{index}{'.png' if result.output == 'png' else '.mp4'}")
            return f"{path}: {result.mode}, seed {pending.seed}, {result.metadata['seconds']:.2f} s"

        pendings = [
            pipeline.submit(
                **{"num_inference_steps": 8, "seed": index, **request},
                output="png" if request["num_frames"] == 1 else "mp4",
            )
            for index, request in enumerate(REQUESTS)
        ]
        for line in pool.map(save, range(len(pendings)), pendings):
            print(line)


if __name__ == "__main__":
    main()
