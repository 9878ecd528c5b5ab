"""The whole house on Ray: every mode equals the fused run, and requests do not get in each other's way."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from conftest import PROMPTS, SIZE
from local import job_of
from safetensors.torch import load_file, save_file

from cosmos3_model.attention import get_backend
from cosmos3_model.config import SnapshotConfig, SnapshotError
from cosmos3_model.loader import shapes_of
from cosmos3_model.towers import GenerationTower, UnderstandingTower
from graph.executor import Executor, Progress
from graph.pipeline import Overloaded, Pipeline
from graph.placement import Limits, Placement
from graph.reference import ReferencePipeline
from graph.request import RequestError
from graph.workers import PipelineError
from kvstore.handle import StoreFull
from nodes.job import DeadlineExceeded

STILL = {**PROMPTS, **SIZE, "num_frames": 1, "num_inference_steps": 4, "seed": 1}
CLIP = {**PROMPTS, **SIZE, "num_frames": 17, "num_inference_steps": 4, "seed": 2}
SLOW = {**PROMPTS, "num_frames": 17, "height": 320, "width": 480, "seed": 3, "output": "latent"}


def test_bfloat16_equals_the_fused_run_bit_for_bit(pipeline: Pipeline, snapshot: Path, picture: np.ndarray) -> None:
    """Image and 17-frame video through the store and the actors, guidance branches in sequence."""
    from nodes.catalog import NODES

    placement = Placement.model_validate({"nodes": {kind: {"dtype": "bfloat16"} for kind in NODES}})
    fused = ReferencePipeline(snapshot, dtype=torch.bfloat16)
    with Pipeline.launch(snapshot, placement) as launched:
        for fields in (STILL, CLIP, CLIP | {"image": picture}):
            assert torch.equal(launched.generate(**fields, output="latent").media, fused(**fields).latents)
            assert np.array_equal(launched.generate(**fields).media, fused(**fields).frames)
        assert launched.stats()["store"]["pages_in_use"] == 0


def test_each_process_holds_its_half_of_the_weights(clean: Pipeline, snapshot: Path) -> None:
    config = SnapshotConfig.from_folder(snapshot).transformer
    sizes = {
        kind: sum(
            int(np.prod(shape)) for shape in shapes_of(lambda tower=tower: tower(config, get_backend("sdpa"))).values()
        )
        for kind, tower in {"prefill": UnderstandingTower, "denoise": GenerationTower}.items()
    }
    assert sizes["prefill"] != sizes["denoise"]
    for kind, size in sizes.items():
        for replica in clean.workers.replicas(kind):
            assert ray.get(replica.actor.count_parameters.remote(), timeout=60) == size, kind


def test_two_prompts_that_share_a_negative_prompt_prefill_it_once(clean: Pipeline) -> None:
    negative = f"blurry {time.time()}"  # a text that no test before has prefilled
    before = clean.stats()["store"]
    clean.generate(**STILL | {"negative_prompt": negative, "prompt": f"A {negative} tree."})
    between = clean.stats()["store"]
    clean.generate(**STILL | {"negative_prompt": negative, "prompt": f"A {negative} house."})
    after = clean.stats()["store"]
    assert between["misses"] - before["misses"] == 2
    assert after["misses"] - between["misses"] == 1
    assert after["hits"] - between["hits"] == 1


def test_the_result_does_not_depend_on_which_replica_ran(clean: Pipeline, fused_run: Any) -> None:
    """Two denoise actors read one entry at the same time."""
    fields = CLIP | {"num_inference_steps": 8}
    pending = [clean.submit(**fields, output="latent") for _ in range(4)]
    results = [item.result(60) for item in pending]
    pids = {timing.pid for result in results for timing in result.timings if timing.node == "denoise"}
    assert len(pids) == 2
    for result in results:
        assert torch.equal(result.media, fused_run(**fields).latents)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)])
def test_mixed_requests_in_flight_equal_each_alone(
    clean: Pipeline, fused_run: Any, picture: np.ndarray, order: Any
) -> None:
    mixed = [
        STILL | {"prompt": "One."},
        CLIP | {"prompt": "Two, at length. " * 9, "guidance_scale": 2.0, "num_inference_steps": 7},
        STILL | {"prompt": "Three.", "height": 48, "width": 80, "guidance_scale": 1.0, "num_inference_steps": 9},
        CLIP | {"prompt": "Four.", "num_frames": 5, "flow_shift": 10.0, "image": picture},
    ]
    pending = {place: clean.submit(**mixed[place], output="latent") for place in order}
    for place, item in pending.items():
        assert torch.equal(item.result(60).media, fused_run(**mixed[place]).latents)


def test_prefill_and_vision_encoding_overlap(clean: Pipeline, picture: np.ndarray) -> None:
    """Long enough for both that running one after the other could not look like this."""
    large = np.asarray(np.kron(picture, np.ones((12, 12, 1))), dtype=np.uint8)
    fields = {"prompt": "word " * 3000, "num_frames": 5, "height": 256, "width": 256, "num_inference_steps": 1}
    result = clean.generate(**fields, image=large, output="latent", guidance_scale=1.0)
    spans = {timing.node: timing for timing in result.timings}
    prefill, encode = spans["prefill"], spans["encode_vision"]
    overlap = min(prefill.end, encode.end) - max(prefill.start, encode.start)
    print(f"prefill {prefill.seconds:.3f} s, encode_vision {encode.seconds:.3f} s, together {overlap:.3f} s")
    assert overlap > 0
    assert prefill.pid != encode.pid


def test_cancel_stops_within_two_steps_and_returns_the_pages(clean: Pipeline) -> None:
    def steps_run() -> int:
        return sum(node["steps"] for node in clean.stats()["nodes"] if node["kind"] == "denoise")

    before = steps_run()
    pending: list[Any] = []
    reached = concurrent.futures.Future[int]()

    def on_progress(progress: Progress) -> None:
        if progress.step == 2:
            pending[0].cancel()
            reached.set_result(progress.num_steps)

    pending.append(clean.submit(**SLOW, num_inference_steps=50, on_progress=on_progress))
    assert reached.result(60) == 50
    with pytest.raises(concurrent.futures.CancelledError):
        pending[0].result(10)
    time.sleep(1.0)
    assert 2 <= steps_run() - before <= 4
    assert sum(node["active"] for node in clean.stats()["nodes"] if node["kind"] == "denoise") == 0


def test_a_cancel_that_overtakes_its_request_still_counts(clean: Pipeline, snapshot: Path) -> None:
    actor = clean.workers.replicas("denoise")[0].actor
    job = job_of(snapshot, "overtaken", **STILL)
    ray.get(actor.cancel.remote("overtaken"), timeout=30)
    with pytest.raises(ray.exceptions.RayTaskError, match="overtaken was cancelled"):
        for item in actor.stream.remote(job, ["vision"], ["handles"], []):
            ray.get(item, timeout=30)


def test_a_request_out_of_time_fails_and_stops(clean: Pipeline) -> None:
    with pytest.raises(DeadlineExceeded, match="ran out of time"):
        clean.generate(**SLOW, num_inference_steps=1000, timeout=1.0)
    deadline = time.monotonic() + 10
    while sum(node["active"] for node in clean.stats()["nodes"] if node["kind"] == "denoise"):
        assert time.monotonic() < deadline, "the denoise node works on"
        time.sleep(0.1)


def test_the_metadata_says_what_was_really_used(clean: Pipeline, snapshot: Path) -> None:
    from cosmos3_model.schedule import ScheduleSettings, solver_for

    config = SnapshotConfig.from_folder(snapshot)
    for asked in ({}, {"flow_shift": 10.0}):
        result = clean.generate(**{**STILL, **asked, "seed": None}, output="latent")
        settings = ScheduleSettings.resolve(config, 4, **asked)
        assert result.metadata["sigmas"] == solver_for(config, settings).sigmas
        assert result.metadata["use_karras_sigmas"] is settings.use_karras_sigmas
        again = clean.generate(**{**STILL, **asked, "seed": result.metadata["seed"]}, output="latent")
        assert torch.equal(again.media, result.media)


def node_processes() -> set[int]:
    return {
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "ray::NodeActor" in (process.info["cmdline"] or [])
    }


def wait_for_processes(expected: set[int]) -> None:
    deadline = time.monotonic() + 20
    while node_processes() - expected:
        assert time.monotonic() < deadline, "actors of a pipeline that did not start are left"
        time.sleep(0.1)


def test_a_start_that_takes_too_long_is_given_up(pipeline: Pipeline, snapshot: Path) -> None:
    before = node_processes()
    with pytest.raises(PipelineError, match=r"node was not ready after 0.01 s"):
        Pipeline.launch(snapshot, Placement(limits=Limits(start_seconds=0.01)))
    wait_for_processes(before)


def test_what_only_a_node_can_find_wrong_stops_the_launch(pipeline: Pipeline, snapshot: Path, tmp_path: Path) -> None:
    """The VAE's keys are known where diffusers is imported, which the driver does not."""
    broken = Path(shutil.copytree(snapshot, tmp_path / "broken"))
    file = broken / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    key = sorted(tensors)[0]
    file.unlink()
    save_file({name: tensor for name, tensor in tensors.items() if name != key}, file)
    before = node_processes()
    with pytest.raises(SnapshotError, match=f"key {key} is missing"):
        Pipeline.launch(broken)
    wait_for_processes(before)


def test_results_go_from_node_to_node_as_references(
    clean: Pipeline, picture: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[Any]] = {}
    inputs = Executor._inputs

    def spy(self: Executor, walk: Any, node: Any) -> Any:
        names, values = inputs(self, walk, node)
        seen[node.name] = values
        return names, values

    monkeypatch.setattr(Executor, "_inputs", spy)
    clean.generate(**CLIP, image=picture)
    assert np.array_equal(seen.pop("encode_vision")[0], picture[None])
    assert seen.pop("encode_text") == []
    assert {node: [type(value) for value in values] for node, values in seen.items()} == {
        "prefill": [ray.ObjectRef],
        "denoise": [ray.ObjectRef, ray.ObjectRef],
        "decode": [ray.ObjectRef],
    }


def test_a_listener_that_fails_does_not_fail_the_request(clean: Pipeline, fused_run: Any) -> None:
    def broken(progress: Progress) -> None:
        raise RuntimeError("the listener's own fault")

    result = clean.generate(**STILL, output="latent", on_progress=broken)
    assert torch.equal(result.media, fused_run(**STILL).latents)


def test_a_cancelled_prefill_has_ended_before_its_pages_go_back(clean: Pipeline) -> None:
    """A call cannot be interrupted; its pages must not be another's while it writes to them."""
    begun = concurrent.futures.Future[None]()

    def on_progress(progress: Progress) -> None:
        if progress.node == "prefill":
            begun.set_result(None)

    pid = next(node["pid"] for node in clean.stats()["nodes"] if node["kind"] == "prefill")
    os.kill(pid, signal.SIGSTOP)
    try:
        pending = clean.submit(**STILL, on_progress=on_progress)
        begun.result(30)
        time.sleep(0.1)
        pending.cancel()
        time.sleep(1.0)
        assert pending.request_id in clean.workers.leases, "released while the call was on its way"
    finally:
        os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + 10
    while clean.workers.leases:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_progress_is_told_in_order(clean: Pipeline) -> None:
    seen: list[Progress] = []
    clean.generate(**STILL, on_progress=seen.append)
    assert [event.node for event in seen if not event.num_steps] == ["encode_text", "prefill", "denoise", "decode"]
    assert [(event.step, event.num_steps) for event in seen if event.num_steps] == [(step, 4) for step in range(1, 5)]


def test_a_result_can_be_awaited(clean: Pipeline, fused_run: Any) -> None:
    async def both() -> list[Any]:
        return await asyncio.gather(*(clean.submit(**STILL, output="latent") for _ in range(2)))

    for result in asyncio.run(both()):
        assert torch.equal(result.media, fused_run(**STILL).latents)


def test_a_bad_request_does_nothing_and_the_next_is_normal(clean: Pipeline) -> None:
    before = clean.stats()["store"]
    with pytest.raises(RequestError, match="num_frames"):
        clean.generate(**STILL | {"num_frames": 16})
    assert clean.stats()["store"] == before
    assert len(clean.generate(**STILL, output="png").media) > 100


def test_a_prompt_larger_than_the_pool_fails_alone(clean: Pipeline) -> None:
    with pytest.raises(StoreFull, match="pages of 16 tokens are needed"):
        clean.generate(**STILL | {"prompt": "x" * 20_000, "guidance_scale": 1.0})
    clean.generate(**STILL)


def test_admission_is_exact(clean: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        clean, "placement", clean.placement.model_copy(update={"limits": Limits(max_in_flight=1, max_queued=1)})
    )
    first, second = (clean.submit(**SLOW, num_inference_steps=30) for _ in range(2))
    with pytest.raises(Overloaded, match="2 requests"):
        clean.submit(**STILL)
    first.cancel()
    second.cancel()


def test_nothing_grows_with_the_number_of_requests(clean: Pipeline) -> None:
    def memory() -> dict[int, int]:
        return {node["pid"]: psutil.Process(node["pid"]).memory_info().rss for node in clean.stats()["nodes"]}

    small = {"height": 32, "width": 32, "num_frames": 1, "num_inference_steps": 2}

    def serve(count: int) -> None:
        pending = [clean.submit(prompt=f"Number {i % 40}.", seed=i, output="png", **small) for i in range(count)]
        for item in pending:
            item.result(120)

    serve(100)
    before, store = memory(), clean.stats()["store"]
    serve(200)
    after = memory()
    grown = {pid: (after[pid] - before[pid]) / 2**20 for pid in before}
    print("MiB grown over 200 requests:", {pid: round(value, 1) for pid, value in grown.items()})
    assert max(grown.values()) < 24
    assert clean.stats()["store"]["entries"] == store["entries"]


def test_time_spent_waiting_for_others_counts(clean: Pipeline) -> None:
    limit = clean.placement.limits.max_in_flight
    others = [clean.submit(**SLOW, num_inference_steps=1000) for _ in range(limit)]
    try:
        with pytest.raises(DeadlineExceeded, match="while it waited for others"):
            clean.generate(**SLOW, num_inference_steps=1000, timeout=1.0)
    finally:
        for other in others:
            other.cancel()


def test_a_mode_that_there_is_not_is_refused_before_ray(snapshot: Path) -> None:
    with pytest.raises(PipelineError, match="mode 'typo' is not one of text-to-image"):
        Pipeline.launch(snapshot, modes=["typo"])
