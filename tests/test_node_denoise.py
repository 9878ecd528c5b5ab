"""The denoise node against the fused run: exact by itself, close in company, and never a neighbour's business."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import has, request_of
from conftest import PROMPTS, SIZE
from local import drain, job_of, local_store, node, prefill

from cosmos3_model.families import FAMILIES
from cosmos3_model.layout import Latents
from graph.modes import MODES
from graph.reference import ReferencePipeline
from graph.request import GenerationRequest
from graph.resolve import sources_of
from kvstore.handle import StaleHandle
from nodes.denoise import Failed, Finished, Saved, StepDone
from nodes.job import DeadlineExceeded, RequestCancelled

MIXED = [
    {"prompt": "A red cube.", "num_frames": 1, "height": 64, "width": 96, "num_inference_steps": 5, "seed": 1},
    {"prompt": "A ball, " * 20, "num_frames": 17, "height": 48, "width": 80, "num_inference_steps": 3, "seed": 2},
    {
        "prompt": "Rain.",
        "num_frames": 1,
        "height": 80,
        "width": 48,
        "num_inference_steps": 7,
        "guidance_scale": 1.0,
        "seed": 3,
    },
    {
        "prompt": "A kitchen.",
        "num_frames": 5,
        "height": 32,
        "width": 32,
        "num_inference_steps": 4,
        "guidance_scale": 3.0,
        "flow_shift": 10.0,
        "seed": 4,
    },
]


class House:
    """Encoder, prefill and denoise over one store."""

    def __init__(self, snapshot: Path, **settings: Any) -> None:
        self.snapshot = snapshot
        common = {"dtype": settings.get("dtype", "float32"), "device": settings.get("device", "cpu")}
        self.store = local_store(snapshot, dtype=common["dtype"])
        self.encoder = node("encoder", snapshot, **common)
        self.prefill = node("prefill", snapshot, self.store, **common)
        self.denoise = node("denoise", snapshot, self.store, **settings)

    def add(self, request_id: str, state: Any = None, **fields: Any) -> None:
        job = job_of(self.snapshot, request_id, **fields)
        sources = sources_of(GenerationRequest.parse(**fields))
        anchor = self.encoder.encode_vision(job, sources["frames"]) if "frames" in sources else None
        handles = prefill(self.prefill, self.encoder, job)
        self.denoise.add(job, handles, anchor, sources.get("actions"), state)

    def run(self, **fields: Any) -> Latents:
        self.add("only", **fields)
        end = drain(self.denoise)["only"]
        assert isinstance(end, Finished), end
        self.store.release("only")
        return end.latents

    def latents(self, **fields: Any) -> torch.Tensor:
        return self.run(**fields)["vision"]


@pytest.fixture(scope="module")
def house(snapshot: Path) -> House:
    return House(snapshot)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("guidance", [6.0, 1.0])
@pytest.mark.parametrize(("frames", "with_image"), [(1, False), (17, False), (17, True)])
def test_cache_once_equals_the_fused_run_bit_for_bit(
    snapshot: Path, picture: np.ndarray, dtype: str, frames: int, guidance: float, with_image: bool
) -> None:
    fields = {**PROMPTS, **SIZE, "num_frames": frames, "guidance_scale": guidance, "num_inference_steps": 4, "seed": 9}
    if with_image:
        fields["image"] = picture
    expected = ReferencePipeline(snapshot, dtype=getattr(torch, dtype))(**fields).latents
    assert torch.equal(House(snapshot, dtype=dtype).latents(**fields), expected)


CASES = [(family, mode) for family in FAMILIES for mode in MODES if has(family, mode, 1.0)]


@pytest.mark.parametrize(("family", "mode"), CASES)
def test_nodes_of_every_family_equal_the_fused_run_in_every_mode(
    families: dict[str, Path], picture: np.ndarray, clip: np.ndarray, family: str, mode: str
) -> None:
    """Every modality's latents, through the store, bit for bit."""
    fields = request_of(family, mode, 6.0, picture, clip)
    expected = ReferencePipeline(families[family])(**fields)
    made = House(families[family]).run(**fields)
    assert torch.equal(made["vision"], expected.latents)
    for name, latents in (("sound", expected.sound_latents), ("action", expected.actions)):
        assert (name in made) == (latents is not None)
        if latents is not None:
            assert torch.equal(made[name], latents)


def test_every_mode_in_one_batch_equals_each_alone(
    snapshot: Path, fused_run: Any, picture: np.ndarray, clip: np.ndarray
) -> None:
    """Vision, sound and action tokens of ten requests in joint forwards; each joins one round after the other."""
    house = House(snapshot, batching="joint")
    requests = {mode: request_of("nano", mode, 3.0, picture, clip) for mode in MODES}
    ends: dict[str, Any] = {}
    for mode, fields in requests.items():
        house.add(mode, **fields)
        ends |= {event.request_id: event for event in house.denoise.step() if isinstance(event, Finished)}
    ends |= drain(house.denoise)
    worst = 0.0
    for mode, fields in requests.items():
        alone = fused_run(**fields)
        for name, latents in (("vision", alone.latents), ("sound", alone.sound_latents), ("action", alone.actions)):
            if latents is not None:
                worst = max(worst, (ends[mode].latents[name] - latents).abs().max().item())
    print(f"ten modes in joint forwards against each alone: max abs diff {worst:.2e}")
    assert max(end.report["largest_batch"] for end in ends.values()) > 3
    assert worst <= 1e-5


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)])
@pytest.mark.parametrize(("batching", "bar"), [("joint", 1e-5), ("exact", 0.0)])
def test_a_mixed_batch_equals_each_alone_whatever_the_order(
    snapshot: Path, fused_run: Any, order: tuple[int, ...], batching: str, bar: float
) -> None:
    """Requests of different sizes, steps and guidance; later ones join while the first are on their way."""
    house = House(snapshot, batching=batching)
    ends: dict[str, Any] = {}
    for place in order:
        house.add(str(place), **MIXED[place])
        for event in house.denoise.step():
            if isinstance(event, Finished | Failed):
                ends[event.request_id] = event
    ends |= drain(house.denoise)
    worst = max((ends[str(i)].latents["vision"] - fused_run(**MIXED[i]).latents).abs().max().item() for i in range(4))
    print(f"{batching}, order {order}: max abs diff {worst:.2e}")
    assert worst <= bar
    assert max(end.report["largest_batch"] for end in ends.values()) == (4 if batching == "joint" else 1)


def test_joint_forwards_are_cut_at_their_limit(snapshot: Path) -> None:
    house = House(snapshot, batching="joint", max_batch_tokens=1)
    for index, fields in enumerate(MIXED):
        house.add(str(index), **fields)
    house.denoise.step()
    assert house.denoise.stats()["forwards"] == 4


def test_progress_comes_after_each_step(house: House) -> None:
    house.add("a", **MIXED[0])
    seen: list[Any] = []
    drain(house.denoise, seen.append)
    steps = [(event.step, event.num_steps) for event in seen if isinstance(event, StepDone)]
    assert steps == [(step, 5) for step in range(1, 6)]


@pytest.mark.parametrize("save_every", [1, 2, 3])
def test_a_request_goes_on_elsewhere_with_the_same_result(snapshot: Path, fused_run: Any, save_every: int) -> None:
    from nodes.codec import pack, unpack

    fields = MIXED[1] | {"num_inference_steps": 6}
    first, second = House(snapshot, save_every=save_every), House(snapshot)
    saved: list[Any] = []
    first.add("a", **fields)
    drain(first.denoise, lambda event: saved.append(event) if isinstance(event, Saved) else None)
    assert [event.step for event in saved] == list(range(save_every, 6, save_every))
    for event in saved:
        second.add("a", state=unpack(pack(event.state)), **fields)
        end = drain(second.denoise)["a"]
        assert torch.equal(end.latents["vision"], fused_run(**fields).latents)
        assert end.report["start_step"] == event.step


def test_a_cancelled_request_leaves_and_the_others_do_not_notice(house: House, fused_run: Any) -> None:
    house.add("stays", **MIXED[0])
    house.add("goes", **MIXED[0] | {"num_inference_steps": 50, "seed": 8})
    house.denoise.step()
    house.denoise.cancel("goes")
    ends = drain(house.denoise)
    assert isinstance(ends["goes"].error, RequestCancelled)
    assert torch.equal(ends["stays"].latents["vision"], fused_run(**MIXED[0]).latents)


def test_a_request_cancelled_before_it_joins_does_not_join(house: House) -> None:
    house.denoise.cancel("early")
    with pytest.raises(RequestCancelled):
        house.add("early", **MIXED[0])
    house.denoise.drop("early")
    assert house.denoise.active == 0
    assert not house.denoise._cancelled


def test_a_request_that_is_out_of_time_leaves(house: House) -> None:
    house.add("late", **MIXED[0], timeout=60.0)
    running = house.denoise._running["late"]
    running.job = job_of(house.snapshot, "late", **MIXED[0], timeout=1e-9)
    assert isinstance(drain(house.denoise)["late"].error, DeadlineExceeded)


@pytest.mark.parametrize("batching", ["exact", "joint"])
def test_one_request_that_fails_does_not_fail_the_others(snapshot: Path, fused_run: Any, batching: str) -> None:
    """A NaN in one request's text, and an error inside the forward of another: each ends that request alone."""
    house = House(snapshot, batching=batching)
    for name, fields in zip("abc", MIXED, strict=False):
        house.add(name, **fields)
    pages = house.store.memory
    entry = house.denoise._running["a"].prefixes[0].handle
    pages.pool[0, entry.pages[0]] = 255  # NaN in float32
    house.denoise._running["b"].prefixes[0].layer = _raise
    ends = drain(house.denoise)
    assert "not finite after step 1 of 5" in str(ends["a"].error)
    assert "no more memory" in str(ends["b"].error)
    assert (ends["c"].latents["vision"] - fused_run(**MIXED[2]).latents).abs().max() <= 1e-5


def _raise(layer: int) -> None:
    raise RuntimeError("no more memory")


def test_pages_that_are_given_away_end_the_request_with_a_name(snapshot: Path) -> None:
    house = House(snapshot)
    house.add("robbed", **MIXED[0])
    house.denoise.step()
    house.store.release("robbed")
    for entry in list(house.store._entries.values()):
        house.store.evict(entry.handle.key)
    assert isinstance(drain(house.denoise)["robbed"].error, StaleHandle)


def test_interleaving_is_a_round_robin(house: House) -> None:
    for name in "ab":
        house.add(name, **MIXED[0])
    order = [event.request_id for _ in range(3) for event in house.denoise.step() if isinstance(event, StepDone)]
    assert order == list(itertools.islice(itertools.cycle("ab"), 6))
    drain(house.denoise)
