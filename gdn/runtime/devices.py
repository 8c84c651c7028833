"""Specs of torch devices. Asks CUDA only about CUDA devices, once per device."""

import functools
import platform
import re
from pathlib import Path

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


@functools.cache
def cpu_fields() -> dict[str, str]:
    """What Linux says of this machine's first CPU: "model name", "cpu family", ...; empty elsewhere."""
    path = Path("/proc/cpuinfo")
    first = path.read_text(encoding="utf-8").partition("\n\n")[0] if path.is_file() else ""
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def cpu_name() -> str:
    """Name of this machine's CPU, without trade marks and clock."""
    name = cpu_fields().get("model name") or platform.processor() or platform.machine()
    return " ".join(re.sub(r"\((R|TM)\)|@.*|\bCPU\b|\b(\d+-Core )?Processor\b", " ", name, flags=re.IGNORECASE).split()) or name


def spec(device: torch.device) -> DeviceSpec | None:
    return describe(device)[0]
