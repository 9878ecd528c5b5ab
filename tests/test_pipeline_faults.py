"""Whatever dies under a request, it completes with the same bytes and leaves nothing behind."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from cases import request_of
from conftest import PROMPTS, SIZE

from graph.executor import Progress
from graph.pipeline import Pipeline
from graph.workers import PipelineError
from nodes.catalog import NODES

CLIP = {**PROMPTS, **SIZE, "num_frames": 17, "num_inference_steps": 4, "seed": 21}
SLOW = {**PROMPTS, "num_frames": 17, "height": 320, "width": 480, "seed": 22, "num_inference_steps": 8}


@pytest.fixture
def healed(clean: Pipeline) -> Any:
    """The pipeline, with every replica alive before the test begins."""
    deadline = time.monotonic() + 60
    while {kind: len(clean.workers.replicas(kind)) for kind in NODES} != {
        "encoder": 1,
        "prefill": 1,
        "denoise": 2,
        "vae_decode": 1,
        "sound_decode": 1,
    }:
        assert time.monotonic() < deadline, "a dead replica was not replaced"
        time.sleep(0.1)
    return clean


def submit_and(pipeline: Pipeline, when: Callable[[Progress], bool], act: Callable[[], None], **fields: Any) -> Any:
    """Submit a request; `act` once, the first time that progress is as `when` says."""
    acted = concurrent.futures.Future[None]()

    def on_progress(progress: Progress) -> None:
        if when(progress) and not acted.done():
            acted.set_result(None)
            act()

    pending = pipeline.submit(**fields, output="latent", on_progress=on_progress)
    acted.result(60)
    return pending


@pytest.mark.parametrize(("at", "resumes_at"), [(1, 0), (3, 2)])
def test_the_denoise_actor_is_killed_on_the_way(healed: Pipeline, fused_run: Any, at: int, resumes_at: int) -> None:
    def kill() -> None:
        busy = max(healed.workers.replicas("denoise"), key=lambda replica: replica.in_flight)
        ray.kill(busy.actor)

    pending = submit_and(healed, lambda progress: progress.step == at, kill, **SLOW)
    result = pending.result(120)
    assert torch.equal(result.media, fused_run(**SLOW).latents)
    denoise = next(timing for timing in result.timings if timing.node == "denoise")
    assert denoise.attempts == 2
    assert result.metadata["start_step"] >= resumes_at
    assert (result.metadata["start_step"] > 0) == (resumes_at > 0)


@pytest.mark.parametrize("mode", ["video-to-video-with-sound", "policy"])
def test_a_request_with_more_than_pictures_survives_its_denoise_actor(
    healed: Pipeline, fused_run: Any, picture: np.ndarray, clip: np.ndarray, mode: str
) -> None:
    def kill() -> None:
        ray.kill(max(healed.workers.replicas("denoise"), key=lambda replica: replica.in_flight).actor)

    fields = request_of("nano", mode, 6.0, picture, clip) | {"num_inference_steps": 40, "prompt": f"{mode}, killed."}
    result = submit_and(healed, lambda progress: progress.step == 3, kill, **fields).result(120)
    expected = fused_run(**fields)
    assert torch.equal(result.media, expected.latents)
    for made, wanted in ((result.sound, expected.sound), (result.actions, expected.actions)):
        assert (made is None) == (wanted is None)
        assert wanted is None or np.array_equal(made, wanted.numpy())
    assert 0 < result.metadata["start_step"] < 40


@pytest.mark.parametrize("kind", ["encoder", "prefill", "vae_decode", "sound_decode"])
def test_a_node_dies_with_the_request_in_it(healed: Pipeline, fused_run: Any, picture: np.ndarray, kind: str) -> None:
    """It is stopped first, so that it cannot have answered when it is killed."""
    fields = CLIP | {"image": picture, "prompt": f"A cube, and the {kind} dies."}
    fields |= {"enable_sound": kind == "sound_decode"}
    node = {"encoder": "encode_text", "prefill": "prefill", "vae_decode": "decode", "sound_decode": "decode_sound"}[
        kind
    ]
    pid = next(stats["pid"] for stats in healed.stats()["nodes"] if stats["kind"] == kind)
    os.kill(pid, signal.SIGSTOP)
    pending = submit_and(healed, lambda progress: progress.node == node, lambda: None, **fields)
    time.sleep(0.3)
    assert not pending.done()
    os.kill(pid, signal.SIGKILL)
    result = pending.result(120)
    assert torch.equal(result.media, fused_run(**fields).latents)
    assert max(timing.attempts for timing in result.timings if timing.node == node) == 2


@pytest.mark.parametrize("kind", ["encoder", "prefill", "vae_decode", "denoise"])
def test_a_node_is_killed_while_it_has_nothing_to_do(healed: Pipeline, fused_run: Any, kind: str) -> None:
    for replica in healed.workers.replicas(kind):
        ray.kill(replica.actor)
    result = healed.submit(**CLIP, output="latent").result(120)
    assert torch.equal(result.media, fused_run(**CLIP).latents)


def store_pid(pipeline: Pipeline) -> int:
    return pipeline.stats()["store"]["pid"]


@pytest.mark.parametrize("node", ["prefill", "denoise"])
def test_the_store_is_killed_under_a_request(healed: Pipeline, fused_run: Any, node: str) -> None:
    """Before prefill it is needed; during denoising the pages stay mapped and the request does not notice."""
    old = healed.stats()["store"]["store_id"]
    first = SLOW if node == "denoise" else CLIP
    actor = healed.workers.store
    when = (lambda p: p.step == 3) if node == "denoise" else (lambda p: p.node == "encode_text")
    pending = submit_and(healed, when, lambda: ray.kill(actor), **first)
    assert torch.equal(pending.result(120).media, fused_run(**first).latents)
    again = healed.submit(**CLIP, output="latent").result(120)
    assert torch.equal(again.media, fused_run(**CLIP).latents)
    stats = healed.stats()["store"]
    assert stats["store_id"] != old
    assert stats["misses"] >= 1, "the text was not prefilled again"


def test_the_store_dies_between_prefill_and_denoise(healed: Pipeline, fused_run: Any) -> None:
    """The handles of the dead store are refused by name, and the text is prefilled into the new one."""
    pids = [stats["pid"] for stats in healed.stats()["nodes"] if stats["kind"] == "denoise"]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    actor, generation = healed.workers.store, healed.workers.store_generation
    pending = submit_and(healed, lambda p: p.node == "denoise", lambda: ray.kill(actor), **CLIP)
    deadline = time.monotonic() + 60
    while healed.workers.store_generation == generation and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert torch.equal(pending.result(120).media, fused_run(**CLIP).latents)


def test_a_node_that_hangs_is_noticed_by_the_heartbeat(healed: Pipeline, fused_run: Any) -> None:
    """Stopped, not dead: nothing but our own heartbeat would tell."""
    pid = next(stats["pid"] for stats in healed.stats()["nodes"] if stats["kind"] == "vae_decode")
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    result = healed.submit(**CLIP, output="latent").result(120)
    print(f"a hanging node cost {time.monotonic() - started:.1f} s")
    assert torch.equal(result.media, fused_run(**CLIP).latents)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid):
        assert time.monotonic() < deadline, "the hanging process is still there"
        time.sleep(0.1)


def test_a_node_that_cannot_start_again_is_told_and_comes_back_when_it_can(healed: Pipeline, snapshot: Path) -> None:
    """The snapshot is gone for a while: requests fail with the reason, and later ones are served."""
    hidden = snapshot.with_name("hidden")
    snapshot.rename(hidden)
    try:
        ray.kill(healed.workers.replicas("prefill")[0].actor)
        with pytest.raises(PipelineError, match=r"no prefill node is left: .*no such snapshot folder"):
            healed.submit(**CLIP, output="latent").result(120)
    finally:
        hidden.rename(snapshot)
    deadline = time.monotonic() + 60
    while not healed.workers.replicas("prefill"):
        assert time.monotonic() < deadline, "the node was given up for good"
        time.sleep(0.2)
    healed.generate(**CLIP)


def test_closing_right_after_a_cancel_waits_for_it_and_for_what_it_left(clean: Pipeline) -> None:
    """Ctrl-C cancels the request and closes the pipeline at once; nothing may be pending when the loop ends."""
    pipeline = Pipeline(clean.snapshot, clean.placement, clean.modes, owns_ray=False)
    events: list[str] = []

    async def let_go() -> None:
        await asyncio.sleep(0.3)
        events.append("let go")

    async def left_behind() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            events.append("ended")

    async def serve() -> None:
        pipeline._register_task()
        tasks.append(asyncio.create_task(left_behind()))
        try:
            started.set()
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.shield(let_go())
            raise

    tasks: list[asyncio.Task[None]] = []
    started = threading.Event()
    pending = asyncio.run_coroutine_threadsafe(serve(), pipeline._loop)
    assert started.wait(5)
    time.sleep(0.1)
    pending.cancel()
    pipeline.close()
    assert events == ["let go", "ended"]
    assert tasks[0].done()
