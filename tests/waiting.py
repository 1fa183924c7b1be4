"""Waiting for a condition, as long as a busy machine needs: no test asserts how long it took."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

#: Less than a test may wait (`conftest.Watch`), so that the condition is named.
LIMIT_S = 50.0


def wait_until(found: Callable[[], Any], wanted: Any = True, limit_s: float = LIMIT_S) -> None:
    """Wait until a function gives what is wanted."""
    deadline = time.monotonic() + limit_s
    while (value := found()) != wanted:
        assert time.monotonic() < deadline, f"{value}, not {wanted}"
        time.sleep(0.002)


async def until(found: Callable[[], Any], wanted: Any = True, limit_s: float = LIMIT_S) -> None:
    """Wait until a function, or a coroutine function, gives what is wanted."""
    deadline = time.monotonic() + limit_s
    while True:
        value = found()
        value = await value if asyncio.iscoroutine(value) else value
        if value == wanted:
            return
        assert time.monotonic() < deadline, f"{value}, not {wanted}"
        await asyncio.sleep(0.002)
