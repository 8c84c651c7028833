"""Constants that operators keep on the device: each belongs to the stream that filled it."""

from collections.abc import Iterator

import pytest
import torch

from gdn.core import constants, modes

CUDA = torch.device("cuda", 0)


class Device:
    """Stands in for a GPU: which stream is current, and whether it is capturing. Constants are made on the CPU."""

    stream = 1
    is_capturing = False


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    gpu, arange, zeros = Device(), torch.arange, torch.zeros
    monkeypatch.setattr(constants, "raw_stream", lambda index: gpu.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.is_capturing)
    monkeypatch.setattr(torch, "arange", lambda *sizes, **options: arange(*sizes, **options | {"device": "cpu"}))
    monkeypatch.setattr(torch, "zeros", lambda *sizes, **options: zeros(*sizes, **options | {"device": "cpu"}))
    forget()
    yield gpu
    forget()


def forget() -> None:
    constants._build_offsets.cache_clear()
    constants._build_zeros.cache_clear()


@pytest.mark.parametrize(("make", "expected"), [
    (lambda: constants.even_offsets(3, 5, CUDA), [0, 5, 10, 15]),
    (lambda: constants.row_indices(3, CUDA), [0, 1, 2]),
    (lambda: constants.zeros(3, CUDA), [0, 0, 0]),
])  # fmt: skip
def test_each_stream_has_its_own(make, expected: list[int], gpu: Device) -> None:
    first = make()
    assert first.tolist() == expected
    assert make().data_ptr() == first.data_ptr()
    gpu.stream = 2
    other = make()
    assert other.tolist() == expected and other.data_ptr() != first.data_ptr()
    gpu.stream = 1
    assert make().data_ptr() == first.data_ptr()


def test_a_capture_neither_takes_nor_keeps_one(gpu: Device) -> None:
    first = constants.zeros(4, CUDA)
    gpu.is_capturing = True
    captured = constants.zeros(4, CUDA)
    assert captured.data_ptr() != first.data_ptr()
    assert constants.zeros(5, CUDA).numel() == 5
    gpu.is_capturing = False
    assert constants.zeros(4, CUDA).data_ptr() == first.data_ptr()
    assert constants._build_zeros.cache_info().currsize == 1


def test_a_tensor_without_memory_is_not_kept() -> None:
    forget()
    with modes.tracing():
        constants.zeros(6, torch.device("cpu"))
    assert constants._build_zeros.cache_info().currsize == 0
