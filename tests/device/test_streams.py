"""Hand-overs between streams, judged without a GPU: see recorded_streams.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import picture
from recorded_streams import Recorder

from raypipe.config import TransformConfig
from raypipe.device.device_decode import DeviceDecoder
from raypipe.device.prefetcher import Batch, HostBatch, decoded_on_device, on_device
from raypipe.device.ring import hand_over, numbered
from raypipe.errors import ConfigError
from raypipe.plan.schedule import MicroBatchId
from raypipe.transform.encoded import EncodedTransform, pack
from raypipe.transform.sample_transform import EncodedSample

CPU = torch.device("cpu")
SIZE, ROWS = 16, 3


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def host_batches(recorder: Recorder, encoded: bool) -> Iterator[HostBatch]:
    """Drawn in the prefetcher's thread, whose operations are recorded from then on."""
    with recorder.operations():
        for step in range(8):
            keys = np.random.default_rng(step).integers(0, 2**64, (ROWS, 2), np.uint64)
            transform = EncodedTransform("light", TransformConfig(size=SIZE))
            samples = [EncodedSample(picture(ROWS * step + i)) for i in range(ROWS)]
            jpegs = pack(map(transform.one, samples, keys))
            yield HostBatch(
                MicroBatchId("train", 0, step, 0),
                np.full((0 if encoded else ROWS, SIZE, SIZE, 3), step, np.uint8),
                np.arange(ROWS),
                np.ones(ROWS, np.float32),
                np.arange(ROWS),
                0,
                encoded=jpegs if encoded else None,
            )


def prefetcher(kind: str, recorder: Recorder) -> Iterable[Batch]:
    given = host_batches(recorder, kind == "decoding")
    if kind == "decoding":
        return decoded_on_device(given, DeviceDecoder(SIZE, CPU), lambda at: 0)
    return on_device(given, CPU, lambda at: 0, ring=True)


@pytest.mark.parametrize("kind", ["decoding", "ring"])
@pytest.mark.parametrize("own_stream", [True, False])
def test_the_consumers_stream_reads_no_batch_before_it_is_made(
    kind: str, own_stream: bool, recorder: Recorder
) -> None:
    stream: Any = torch.cpu.Stream() if own_stream else torch.cpu.current_stream()
    used: list[tuple[int, int]] = []
    with recorder.stream(stream), recorder.operations():
        for batch in prefetcher(kind, recorder):
            for tensor in (batch.image, batch.target, batch.weight):
                tensor.sum()
                used.append((tensor.data_ptr(), stream.number))
    assert not recorder.errors, recorder.errors[0]
    assert len(used) == 3 * 8 and recorder.handed_over >= set(used)


@pytest.mark.parametrize("kind", ["decoding", "ring"])
def test_the_judge_sees_a_stream_that_does_not_wait(
    kind: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raypipe.device.prefetcher.hand_over", lambda *_: None)
    monkeypatch.setattr("raypipe.device.ring.hand_over", lambda *_: None)
    with recorder.stream(torch.cpu.Stream()), recorder.operations():
        for batch in prefetcher(kind, recorder):
            batch.image.sum()
    assert recorder.errors


def test_what_is_decoded_directly_is_handed_to_the_stream_that_is_current(recorder: Recorder) -> None:
    stream: Any = torch.cpu.Stream()
    with recorder.operations():
        decoder = DeviceDecoder(SIZE, CPU)
        [batch, *_] = host_batches(recorder, True)
        with recorder.stream(stream):
            assert batch.encoded is not None
            image = decoder.decode(**batch.encoded).image
            image.sum()
    assert (image.data_ptr(), stream.number) in recorder.handed_over and not recorder.errors


def test_the_allocator_is_told_of_tensors_on_cuda_alone(recorder: Recorder) -> None:
    class Tensor:
        def __init__(self, is_cuda: bool) -> None:
            self.is_cuda, self.streams = is_cuda, list[Any]()

        def record_stream(self, stream: Any) -> None:
            self.streams.append(stream)

    stream: Any = torch.cpu.Stream()
    there, here = Tensor(True), Tensor(False)
    ready = torch.cpu.Event()
    ready.record()
    with recorder.stream(stream):
        hand_over(ready, [there, here], CPU)  # type: ignore[list-item]
    assert (there.streams, here.streams) == ([stream], [])


def test_a_device_without_a_number_is_the_one_that_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert numbered("cuda") == torch.device("cuda", 3)
    assert numbered(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert numbered("cpu") == CPU
    with pytest.raises(ConfigError, match="device is mps"):
        numbered("mps")
