"""Specs of torch devices. Asks CUDA only about CUDA devices, once per device."""

import functools

import torch

from gdn.device import DeviceSpec, spec_from_name


@functools.cache
def _cuda(index: int) -> tuple[DeviceSpec | None, str]:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    spec = spec_from_name(properties.name, capability, properties.multi_processor_count)
    return spec, f"{properties.name} (SM{capability[0]}{capability[1]})"


def describe(device: torch.device) -> tuple[DeviceSpec | None, str]:
    """Spec of a device (None where no kernel of this project runs) and its name for messages."""
    if device.type != "cuda":
        return None, f"device {device.type}"
    return _cuda(torch.cuda.current_device() if device.index is None else device.index)


def spec(device: torch.device) -> DeviceSpec | None:
    return describe(device)[0]
