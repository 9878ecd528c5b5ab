"""What this machine can run, tried and not guessed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console


@dataclass(frozen=True)
class Finding:
    """One line of the report; `fix` is set when pictures and clips cannot be made because of it."""

    name: str
    found: str
    fix: str | None = None


def report(console: Console) -> bool:
    """Print one line per finding; True if the main job, making pictures and clips, can run."""
    findings: list[Finding] = []
    for probe in (_python, _torch, _gpu, _attention, _diffusers, _media, _memory, _ray):
        try:
            finding = probe()
        except ImportError as error:  # what is missing has a line and a fix of its own, or is named here
            finding = Finding(probe.__name__.strip("_"), f"not known: {error}", "mend what is named above, then again")
        findings.append(finding)
        mark = "[green]ok[/]  " if finding.fix is None else "[red]fail[/]"
        console.print(f"{mark} {finding.name:<10} {finding.found}")
    missing = [finding for finding in findings if finding.fix is not None]
    for finding in missing:
        console.print(f"fix {finding.name}: {finding.fix}")
    console.print("this machine can make pictures and clips" if not missing else "this machine cannot run the pipeline")
    return not missing


def _python() -> Finding:
    return Finding("python", platform.python_version())


def _torch() -> Finding:
    return _library("torch", "torch", "pip install torch")


def _diffusers() -> Finding:
    return _library("diffusers", "diffusers", 'pip install "diffusers>=0.42.1,<0.43"')


def _library(name: str, package: str, fix: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "not installed", fix)


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("gpu", "none; nodes run on the CPU")
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    return Finding("gpu", f"{torch.cuda.device_count()} x {', '.join(sorted(names))}")


def _attention() -> Finding:
    from cosmos3_model.attention import BACKENDS

    return Finding("attention", ", ".join(sorted(BACKENDS)))


def _media() -> Finding:
    from nodes.media import missing_encoder

    problem = missing_encoder("mp4")
    if problem:
        return Finding("encoders", "png, jpeg, webp, npy; no mp4", problem)
    return Finding("encoders", "png, jpeg, webp, npy, mp4 (H.264)")


def _memory() -> Finding:
    from kvstore.region import SharedRegion

    def share() -> str:
        region = SharedRegion.create(4096)
        SharedRegion.attach(region.address).buffer[0] = 7
        return "pages are shared between processes" if region.buffer[0] == 7 else "a mapped page was not shared"

    return _attempt("memory", share, "run on Linux with /proc mounted")


def _ray() -> Finding:
    def start() -> str:
        import ray

        from graph.cluster import start_ray

        started = start_ray()
        cpus = int(ray.cluster_resources().get("CPU", 0))
        if started:
            ray.shutdown()
        return f"{ray.__version__}, starts here with {cpus} CPUs of {os.cpu_count()}"

    return _attempt("ray", start, 'pip install "ray[serve]==2.60.0", and unset RAY_ADDRESS if it names no cluster')


def _attempt(name: str, action: Callable[[], str], fix: str) -> Finding:
    try:
        return Finding(name, action())
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        return Finding(name, " ".join(f"{type(error).__name__}: {error}".split())[:200], fix)
