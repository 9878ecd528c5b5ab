"""What the pipeline costs over one process: launch, each hop, each request, one and four in flight, memory.

    python benchmarks/pipeline.py [--requests 200] [--json FILE]

The tiny random snapshot makes the work itself small, so that what is left is the pipeline's own.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from cosmos3_model.snapshot import write_snapshot
from graph.pipeline import Pipeline
from graph.reference import ReferencePipeline
from graph.result import GenerationResult

REQUESTS: dict[str, dict[str, Any]] = {
    "image 64x96, 8 steps": {"num_frames": 1, "height": 64, "width": 96, "num_inference_steps": 8},
    "video 64x96, 17 frames, 8 steps": {"num_frames": 17, "height": 64, "width": 96, "num_inference_steps": 8},
}
PROMPTS = {"prompt": "A red cube on a table.", "negative_prompt": "blurry"}
REPEATS = 15


def milliseconds(action: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = action()
    return (time.perf_counter() - started) * 1000, result


def hops(result: GenerationResult) -> dict[str, float]:
    """Milliseconds of each hop of a chain, in which no node works: from the caller, between nodes, and back."""
    timings = sorted(result.timings, key=lambda timing: timing.start)
    names = ["caller", *(timing.node for timing in timings), "caller"]
    ends = [0.0, *(timing.end for timing in timings)]
    starts = [*(timing.start for timing in timings), result.metadata["seconds"]]
    return {
        f"{source} to {target}": (start - end) * 1000
        for source, target, end, start in zip(names, names[1:], ends, starts, strict=False)
    }


def four_in_flight(pipeline: Pipeline, fields: dict[str, Any]) -> float:
    """Milliseconds a request with four in flight."""
    started = time.perf_counter()
    for pending in [pipeline.submit(**PROMPTS, **fields, seed=seed) for seed in range(4)]:
        pending.result(120)
    return (time.perf_counter() - started) * 1000 / 4


def median_of(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def pool_mapping_kib(pid: int) -> dict[str, int]:
    """What the K/V pool takes of a process, as the kernel counts it."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    block = re.search(r"memfd:cosmoray-pool.*?(?=\n[0-9a-f]+-[0-9a-f]+ |\Z)", text, re.S)
    values = {name: int(kib) for name, kib in re.findall(r"(\w+):\s+(\d+) kB", block.group() if block else "")}
    private = values.get("Private_Clean", 0) + values.get("Private_Dirty", 0)
    return {"rss": values.get("Rss", 0), "proportional": values.get("Pss", 0), "private": private}


def measure(requests: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {"requests": {}}
    with tempfile.TemporaryDirectory() as folder:
        snapshot = write_snapshot(Path(folder) / "tiny")
        ready: dict[str, float] = {}
        started = time.perf_counter()
        launched = Pipeline.launch(
            snapshot, on_ready=lambda name: ready.setdefault(name, time.perf_counter() - started)
        )
        found["launch_s"] = time.perf_counter() - started
        found["ready_s"] = ready
        fused = ReferencePipeline(snapshot)
        with launched as pipeline:
            for name, fields in REQUESTS.items():
                pipeline.generate(**PROMPTS, **fields, seed=0)
                fused(**PROMPTS, **fields)
                ours = [
                    milliseconds(lambda f=fields: pipeline.generate(**PROMPTS, **f, seed=0)) for _ in range(REPEATS)
                ]
                alone = [milliseconds(lambda f=fields: fused(**PROMPTS, **f))[0] for _ in range(REPEATS)]
                found["requests"][name] = {
                    "fused_ms": statistics.median(alone),
                    "pipeline_ms": statistics.median(spent for spent, _ in ours),
                    "hops_ms": median_of([hops(result) for _, result in ours]),
                    "four_in_flight_ms_each": statistics.median(four_in_flight(pipeline, fields) for _ in range(5)),
                }
            fields = REQUESTS["image 64x96, 8 steps"]
            series = [milliseconds(lambda: pipeline.generate(**PROMPTS, **fields, seed=0))[0] for _ in range(requests)]
            quarter = max(1, requests // 4)
            found["growth"] = {
                "requests": requests,
                "first_quarter_ms": statistics.median(series[:quarter]),
                "last_quarter_ms": statistics.median(series[-quarter:]),
            }
            stats = pipeline.stats()
            found["pool_kib"] = {
                node["kind"]: pool_mapping_kib(node["pid"]) for node in stats["nodes"] if node.get("pool") == "shared"
            }
            found["pool_kib"]["kvstore"] = pool_mapping_kib(stats["store"]["pid"])
            found["pages_in_use_after"] = stats["store"]["pages_in_use"]
    return found


def show(found: dict[str, Any], console: Console) -> None:
    console.print(f"{found['date']}, {found['machine']}, {found['versions']}")
    names = ", ".join(f"{name} {seconds:.1f}" for name, seconds in found["ready_s"].items())
    console.print(f"launch to ready: {found['launch_s']:.1f} s ({names})")
    table = Table("request", "fused ms", "pipeline ms", "over fused ms", "mean hop ms", "4 in flight, ms each")
    for name, row in found["requests"].items():
        over = row["pipeline_ms"] - row["fused_ms"]
        mean_hop = statistics.mean(row["hops_ms"].values())
        cells = (row["fused_ms"], row["pipeline_ms"], over, mean_hop, row["four_in_flight_ms_each"])
        table.add_row(name, *(f"{cell:.1f}" for cell in cells))
    console.print(table)
    for name, row in found["requests"].items():
        console.print(f"hops of {name}: " + ", ".join(f"{hop} {spent:.1f} ms" for hop, spent in row["hops_ms"].items()))
    growth = found["growth"]
    console.print(
        f"{growth['requests']} requests in a row: {growth['first_quarter_ms']:.1f} ms each in the first quarter, "
        f"{growth['last_quarter_ms']:.1f} ms in the last; pages in use after: {found['pages_in_use_after']}"
    )
    for name, kib in found["pool_kib"].items():
        console.print(
            f"pool in {name}: {kib['rss']} KiB mapped, {kib['proportional']} its share, {kib['private']} its own"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="requests in a row, to see whether anything grows")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    found = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "ray", "diffusers")},
    } | measure(args.requests)
    show(found, Console(width=120, highlight=False))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
