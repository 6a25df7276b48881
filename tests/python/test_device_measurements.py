"""What `doctor` and codec="auto" measure on a device: in large worlds, and when a rank cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gradferry import PeerError, _native
from gradferry.core.codec_spec import parse_codec
from gradferry.errors import ProtocolError
from gradferry.forecast.measure_link import on_all_ranks
from test_device_forecast import LAYER_S, Prices, case_doctor, priced
from world import World

Worlds = Callable[[int], World]


@pytest.fixture
def worlds(device_worlds: Worlds) -> Worlds:
    return device_worlds


def case_large_world(prices: Prices, world_size: int) -> tuple[Any, list[int]]:
    """The costs of a codec there, and how many elements each of the measured chunks had."""
    import fake_device
    from gradferry.forecast.costs import ParameterCodec
    from gradferry.forecast.measure_device_codecs import measure_codec_on

    made = []
    make = _native.DeviceCodec

    def noted(**arguments: Any) -> Any:
        made.append(arguments["num_elements"] * arguments["world_size"])
        return make(**arguments)

    codec = ParameterCodec(parse_codec("q4"), (False, True), momentum=False)
    arguments = (fake_device.DEVICE, codec, torch.float32, world_size, 1 << 17)
    with priced(prices), mock.patch.object(_native, "DeviceCodec", noted):
        return measure_codec_on(*arguments), made


def test_a_large_world_needs_no_more_memory_to_be_measured(worlds: Worlds) -> None:
    world_size = 16
    ((costs, elements),) = worlds(1).run(case_large_world, prices=Prices(), world_size=world_size)
    assert max(elements) <= 4 * (1 << 17)
    payload = _native.payload_bytes("q4", 4096, torch.float32, "worker") / 4096
    touched = (world_size + 1) * payload + 4
    # Beside payloads and residual, 104 bytes per tile of 4096 elements.
    assert costs.reduce_per_element == pytest.approx(touched * Prices().byte, rel=0.01, abs=0)


def no_memory(*arguments: Any, **named: Any) -> Any:
    raise torch.OutOfMemoryError("no memory left")


@contextlib.contextmanager
def no_memory_for_the_link(kind: str) -> Iterator[None]:
    """While the link is measured, this rank has no memory for the buffers of collectives."""
    from gradferry.forecast.measure_device_link import DeviceLinkProbe

    measure = DeviceLinkProbe.measure
    place = "cpu" if kind == "staged" else "fake"  # pinned memory, the last to be allocated
    zeros = torch.zeros

    def full(*size: Any, **named: Any) -> torch.Tensor:
        if torch.device(named["device"]).type == place:
            no_memory()
        return zeros(*size, **named)

    def measured(self: Any, *arguments: Any) -> Any:
        with mock.patch.object(torch, "zeros", full):
            return measure(self, *arguments)

    with mock.patch.object(DeviceLinkProbe, "measure", measured):
        yield


def case_one_rank_without_memory(
    prices: Prices, layer_s: float, what: str, kind: str = "streamed"
) -> Any:
    from gradferry.forecast import measure
    from outcomes import attempt

    full: Any = contextlib.nullcontext()
    if dist.get_rank() == 1:
        full = {
            "codecs": mock.patch.object(measure, "measure_codec_on", no_memory),
            "the link": no_memory_for_the_link(kind),
        }[what]
    with full:
        return attempt(lambda: case_doctor(prices, layer_s, ["q4"], kind))


@pytest.mark.parametrize(
    ("what", "kind"), [("codecs", "streamed"), ("the link", "streamed"), ("the link", "staged")]
)
def test_a_rank_without_memory_is_an_error_on_all(worlds: Worlds, what: str, kind: str) -> None:
    arguments = {"prices": Prices(), "layer_s": LAYER_S, "what": what, "kind": kind}
    other, full = worlds(2).run(case_one_rank_without_memory, **arguments)
    assert (other.error, full.error) == ("PeerError", "PeerError"), (other, full)
    assert f"another rank cannot measure {what}; its own error says why" in other.text
    assert f"this rank cannot measure {what}: no memory left" in full.text


@pytest.mark.parametrize(
    ("error", "raised"), [(OSError("full"), PeerError), (ProtocolError("refused"), ProtocolError)]
)
def test_any_error_reaches_the_other_ranks(error: Exception, raised: type[Exception]) -> None:
    said: list[Sequence[float]] = []

    def most(values: Sequence[float]) -> list[float]:
        said.append(values)
        return list(values)

    def prepare() -> None:
        raise error

    with pytest.raises(raised, match=str(error)):
        on_all_ranks(most, "codecs", prepare)
    assert said == [[1.0]]
