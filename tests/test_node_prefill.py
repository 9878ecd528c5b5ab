"""The prefill node against the fused run's text K/V, and what it does with the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PROMPTS, SIZE
from local import job_of, local_store, node, prefill

from cosmos3_model.sampling import NonFiniteError
from graph.reference import ReferencePipeline
from kvstore.handle import StoreFull
from kvstore.mapping import PoolAccess

FIELDS = {**PROMPTS, **SIZE, "num_frames": 1, "num_inference_steps": 1, "seed": 0}


@pytest.fixture(scope="module")
def encoder(snapshot: Path) -> Any:
    return node("encoder", snapshot)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("page_size", [16, 7])
def test_kv_through_the_store_equals_the_fused_run(
    snapshot: Path, encoder: Any, dtype: str, share: bool, page_size: int
) -> None:
    store = local_store(snapshot, dtype=dtype, page_size=page_size)
    prefiller = node("prefill", snapshot, store, dtype=dtype, share_pool=share)
    handles = prefill(prefiller, encoder, job_of(snapshot, **FIELDS))
    run = ReferencePipeline(snapshot, dtype=getattr(torch, dtype))(**FIELDS)
    access = PoolAccess(store)
    for handle, expected in zip(handles, run.prefixes, strict=True):
        prefix = access.resolve(handle)
        for layer, (k, v) in enumerate(expected.layers):
            assert torch.equal(prefix.layer(layer)[0], k)
            assert torch.equal(prefix.layer(layer)[1], v)


def test_two_prompts_that_share_a_negative_prompt_prefill_it_once(snapshot: Path, encoder: Any) -> None:
    store = local_store(snapshot)
    prefiller = node("prefill", snapshot, store)
    first = prefill(prefiller, encoder, job_of(snapshot, **FIELDS))
    second = prefill(prefiller, encoder, job_of(snapshot, **FIELDS | {"prompt": "A blue ball."}))
    assert first[1] == second[1]
    assert first[0] != second[0]
    assert prefiller.stats()["prefilled_prompts"] == 3
    assert prefiller.stats()["store_hits"] == 1
    assert (store.stats()["hits"], store.stats()["misses"]) == (1, 3)


def test_guidance_of_one_takes_no_page_for_the_negative_prompt(snapshot: Path, encoder: Any) -> None:
    store = local_store(snapshot)
    job = job_of(snapshot, **FIELDS | {"guidance_scale": 1.0})
    assert len(prefill(node("prefill", snapshot, store), encoder, job)) == 1
    assert store.stats()["entries"] == 1


def test_a_prompt_that_does_not_fit_leaves_nothing_behind(snapshot: Path, encoder: Any) -> None:
    store = local_store(snapshot, pages=4)
    with pytest.raises(StoreFull):
        prefill(node("prefill", snapshot, store), encoder, job_of(snapshot, **FIELDS))
    assert store.stats()["pages_in_use"] == 0
    assert store.check_integrity()


def test_not_a_number_in_the_tower_is_not_stored(snapshot: Path, encoder: Any) -> None:
    store = local_store(snapshot)
    prefiller = node("prefill", snapshot, store)
    prefiller._tower.layers[1].self_attn.to_v.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="layer 1"):
        prefill(prefiller, encoder, job_of(snapshot, **FIELDS))
    assert store.stats()["entries"] == store.stats()["leases"] == 0


def test_a_call_that_is_made_again_goes_on_with_its_reservation(snapshot: Path, encoder: Any) -> None:
    """As after a crash: the same owner reserved both entries, and wrote neither."""
    store = local_store(snapshot)
    prefiller = node("prefill", snapshot, store)
    job = job_of(snapshot, **FIELDS)
    commit, store.commit = store.commit, lambda handle, owner: None  # type: ignore[method-assign]
    prefill(prefiller, encoder, job)
    store.commit = commit  # type: ignore[method-assign]
    handles = prefill(prefiller, encoder, job)
    assert [store.check(handle) for handle in handles] == [None, None]
    store.release(job.request_id)
    assert store.check_integrity()
