"""The Ray instance that a pipeline runs on: one that is there, or a private one on this machine."""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray


def start_ray() -> bool:
    """Start Ray on this machine if this process is not connected to one; True if it was started here.

    Ray listens on every interface, so it is started with an access token that only this process and its children
    know: drawn here, and not left in the home folder. RAY_AUTH_MODE, where set, is left as it is. RAY_ADDRESS, where
    set, names a running cluster to use instead.
    """
    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if not os.environ.get("RAY_ADDRESS"):
        if "RAY_AUTH_MODE" not in os.environ:
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
            _reread_environment()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        quiet |= {"address": "local", "include_dashboard": False}
    try:
        with _interrupts_wait():
            ray.init(**quiet)
    except BaseException:
        ray.shutdown()
        raise
    return True


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C takes effect at the end of the block: a process in which Ray starts halfway may crash when it ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[Any, ...]] = []
    handler = signal.signal(signal.SIGINT, lambda *given: came.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came and callable(handler):
            handler(*came[0])


def _reread_environment() -> None:
    """Ray reads its settings once, when it is imported, which was before we set them."""
    from ray import _raylet

    raylet: Any = _raylet
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
