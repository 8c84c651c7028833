"""Kernel module of the sample operator: out = factor * x, for x [tokens, dim]. It compiles to a text, and launches by torch."""

from dataclasses import dataclass
from typing import Any

from gdn.device import DeviceSpec
from tests.sample_operator.problem import SampleScaleParams, SampleScaleProblem


@dataclass(frozen=True)
class Config:
    rows: int  # per thread block


def refusal(problem: SampleScaleProblem) -> str | None:
    return None if problem.dim % 8 == 0 else f"requires a multiple of 8 columns, got {problem.dim}"


def fits(problem: SampleScaleProblem, config: Config, device: DeviceSpec) -> bool:
    return config.rows in (1, 2, 4)


def default_config(problem: SampleScaleProblem, device: DeviceSpec) -> Config:
    return Config(1)


def configs(problem: SampleScaleProblem, device: DeviceSpec) -> list[Config]:
    return [Config(rows) for rows in (1, 2, 4)]


def compile(problem: SampleScaleProblem, config: Config) -> dict[str, bytes]:
    return {"sample_scale": f"{problem.static_key()} {config}".encode()}


def workspace_bytes(problem: SampleScaleProblem, config: Config) -> int:
    return 0


def launch(compiled: Any, params: SampleScaleParams) -> None:
    params.out.copy_(params.x.to(params.out.dtype) * params.factor)
