"""The benchmark runs, prints its table, and what it measures is what the design promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_pipeline_benchmark_prints_and_writes_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    command = [sys.executable, str(ROOT / "benchmarks" / "pipeline.py"), "--requests", "8", "--json", str(file)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "launch to ready:" in done.stdout
    found = json.loads(file.read_text())
    assert found["pages_in_use_after"] == 0
    assert all(row["pipeline_ms"] > 0 and len(row["hops_ms"]) == 5 for row in found["requests"].values())
    # Readers on the store's host map its pages and own none of them.
    for kind in ("prefill", "denoise"):
        assert found["pool_kib"][kind]["rss"] > 0
        assert found["pool_kib"][kind]["private"] == 0
