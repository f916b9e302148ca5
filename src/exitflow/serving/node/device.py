"""A node inside the user's own program: a function instead of a server.

Whatever the node is sure of is computed and decided in the caller's own thread. Only what goes up touches the event
loop, which runs in a thread beside it and is there only where a parent was named.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from exitflow.errors import ConfigError, ServingError
from exitflow.serving.bundle.bundle import DATATYPES, load_bundle
from exitflow.serving.node.jobs import Job
from exitflow.serving.node.node import NEVER, ExpiredError, Node
from exitflow.serving.node.node_settings import serving_spec
from exitflow.serving.node.status import NodeStatus, status
from exitflow.serving.wire.answers import Answers, BadRequestError
from exitflow.serving.wire.security import Security

log = logging.getLogger("exitflow.serving")

GRACE = 5.0  # seconds that what is under way is given when the device is closed

_devices: weakref.WeakSet[Device] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Answer:
    """What the hierarchy says about one input."""

    label: int  # the class
    exit: int  # that answered
    node: str  # that answered
    confidence: float  # of that exit; which kind, the bundle says
    scores: npt.NDArray[np.float32]  # (C,), sum to 1


class Device:
    """One node of a bundle, to be called from any thread.

        with Device("bundles/campus", node="device-0", parents={"edge-0": "10.0.0.2:8001"}) as device:
            answer = device.infer(image)

    It decides, keeps to the limits of its links, audits, counts and reloads as `exitflow serve` does: it is the same
    node. Without parents it needs no network at all.
    """

    def __init__(
        self,
        bundle: str | Path,
        *,
        node: str,
        parents: Mapping[str, str] | None = None,
        certs: str | None = None,
        token: str | None = None,
        settings: Iterable[str] = (),
    ) -> None:
        """`parents`: name -> HOST:PORT. `settings`: texts such as "audit_share=0", as `exitflow serve --set` takes."""
        spec, security = serving_spec(tuple(settings)), Security(certs, token)
        if certs and (name := security.shown.name) != node:
            raise ConfigError(f"{certs}: is the certificate of {name!r}, not that of node {node!r}", key="certs")
        exit = load_bundle(bundle, max_exit=0).node(node, key="node").exit
        self._node = Node(load_bundle(bundle, max_exit=exit), node, spec, dict(parents or {}), security=security)
        self._waits = spec.wait == "parent"
        self._unusable = ""  # why it cannot be asked any more
        self._loop: asyncio.AbstractEventLoop | None = None
        if parents:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="exitflow-device", daemon=True)
            self._thread.start()
            self._in_loop(self._start())
        _devices.add(self)

    def infer(
        self,
        image: npt.ArrayLike,
        *,
        timeout: float | None = None,
        wait: Literal["parent", "never"] | None = None,
        then: Callable[[Answer], object] | None = None,
    ) -> Answer:
        """The answer to one input of the bundle's shape and type.

        After `timeout` seconds it is the device's own. With `wait="never"` it is so at once, and what would have been
        asked goes up in the background, within the limit; `then` is called with the deeper answer when one comes, in
        the device's own thread.
        """
        return _answer(self._finish(*self._begin(self._inputs(image, 0), timeout, wait, then)), 0)

    def infer_many(self, images: npt.ArrayLike, *, timeout: float | None = None) -> list[Answer]:
        """The answers to (N, ...) inputs, computed together."""
        inputs, most = self._inputs(images, 1), self._node.spec.max_batch
        begun = [
            self._begin(inputs[first : first + most], timeout, None, None) for first in range(0, len(inputs), most)
        ]
        finished = [self._finish(*each) for each in begun]
        return [_answer(answers, row) for answers in finished for row in range(len(answers.nodes))]

    async def ainfer(self, image: npt.ArrayLike, *, timeout: float | None = None) -> Answer:
        """As `infer`, for programs with an event loop: it computes, and does not hold up the loop while parents do."""
        job, waits = self._begin(self._inputs(image, 0), timeout, None, None)
        if waits:
            assert isinstance(job.future, concurrent.futures.Future)
            await asyncio.wrap_future(job.future)
        return _answer(self._finish(job, waits), 0)

    def status(self) -> NodeStatus:
        """What `exitflow serve` tells about itself at /status."""
        return status(self._node)

    def reload(self, bundle: str | Path | None = None) -> str:
        """Read the bundle's directory again, or take that of another, and return its version; no request is lost."""
        self._check_usable()
        return self._node.load_again(bundle).version

    def close(self) -> None:
        """End what is under way, and the connections; twice is fine."""
        if self._loop and not self._unusable:
            with contextlib.suppress(TimeoutError):
                self._in_loop(asyncio.wait_for(self._node.close(), GRACE))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        self._unusable = self._unusable or "this device is closed"

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _start(self) -> None:
        self._node.start()

    def _in_loop(self, work: Any) -> None:
        assert self._loop
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _begin(
        self,
        inputs: npt.NDArray[Any],
        timeout: float | None,
        wait: str | None,
        then: Callable[[Answer], object] | None,
    ) -> tuple[Job, bool]:
        """A computed job, and whether its answers are to be waited for."""
        self._check_usable()
        deadline = NEVER if timeout is None else self._node.now + timeout
        deeper = _caller(then) if then else None
        waits = self._waits if wait is None else wait == "parent"
        try:
            job, ask = self._node.infer_here(inputs, deadline=deadline, waits=waits, deeper=deeper)
        except BadRequestError as error:
            raise ServingError(str(error)) from None
        except ExpiredError:
            raise ServingError(f"timeout: must be above 0, got {timeout}") from None
        waits = job.pending > 0
        if ask:
            assert self._loop
            self._loop.call_soon_threadsafe(ask)
        return job, waits

    def _finish(self, job: Job, waits: bool) -> Answers:
        if waits:
            assert isinstance(job.future, concurrent.futures.Future)
            return job.future.result()
        assert job.answers
        return job.answers

    def _inputs(self, values: npt.ArrayLike, axes: int) -> npt.NDArray[Any]:
        """(N, ...) as the bundle wants them; `axes` more than one sample has."""
        manifest = self._node.current.bundle.manifest
        wanted = DATATYPES[manifest.input_datatype]
        array = np.asarray(values)
        if array.dtype != wanted:
            if wanted is np.uint8 or array.dtype.kind not in "fiu":
                raise ServingError(f"the input has type {array.dtype}, this bundle takes {np.dtype(wanted)}")
            array = array.astype(wanted)
        if array.shape[axes:] != manifest.input_shape or array.ndim != len(manifest.input_shape) + axes:
            shape = ", ".join(map(str, (*"N" * axes, *manifest.input_shape)))
            raise ServingError(f"the input has shape {list(array.shape)[:10]}, this bundle takes [{shape}]")
        if wanted is not np.uint8 and not np.isfinite(array).all():
            raise ServingError("the input holds NaN or infinity")
        return array if axes else array[None]

    def _check_usable(self) -> None:
        if self._unusable:
            raise ServingError(self._unusable)


def _answer(answers: Answers, row: int) -> Answer:
    scores = answers.scores[row]
    return Answer(
        int(scores.argmax()), int(answers.exits[row]), answers.nodes[row], float(answers.confidences[row]), scores
    )


def _caller(then: Callable[[Answer], object]) -> Callable[[int, Answers, int], None]:
    def tell(_: int, answers: Answers, row: int) -> None:
        try:
            then(_answer(answers, row))
        except Exception:
            log.exception("a callback failed")

    return tell


def _after_fork() -> None:
    for device in list(_devices):
        device._unusable = "this device was made before a fork: its threads are not here; make one in the new process"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
