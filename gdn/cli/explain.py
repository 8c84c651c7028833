"""`gdn explain`: the kernels and tiles that an operator would run on a model's shapes, without tensors, for any device."""

from typing import Annotated

import typer
from rich.console import Console

from gdn.cli.plain import print_json
from gdn.device import H100, H200, DeviceSpec
from gdn.models import MODELS

_SPECS = {"h100": H100, "h200": H200}


def explain_command(
    op: Annotated[str, typer.Argument(help="A public function of gdn, or an operator's short name such as chunk.")],
    fields: Annotated[
        list[str] | None, typer.Argument(help="Fields of the problem to change, as name=value (head_k_dim=96).")
    ] = None,
    model: Annotated[str, typer.Option(help=f"Shapes: {', '.join(MODELS)}.")] = "qwen3-next-80b",
    tp: Annotated[int, typer.Option(help="Tensor parallel ranks; the shapes of one rank are taken.")] = 1,
    device: Annotated[str, typer.Option(help="auto (this machine's), h100, h200 or cpu.")] = "auto",
    backend: Annotated[str | None, typer.Option(help="As the function's argument: tilelang, cute or reference.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which kernels and tiles an operator would run, and why."""
    if model not in MODELS:
        raise typer.BadParameter(f"expected one of {', '.join(MODELS)}, got {model!r}", param_hint="--model")
    if device not in ("auto", "cpu", *_SPECS):
        raise typer.BadParameter(f"expected auto, h100, h200 or cpu, got {device!r}", param_hint="--device")
    from gdn.cli.explained import parts_of
    from gdn.runtime import registry

    operator = registry.operator(op)
    function = op if op in operator.functions else next(iter(operator.functions), operator.name)
    spec = _spec(device)
    parts = parts_of(function, MODELS[model].per_rank(tp), spec, backend, fields or [])
    if as_json:
        about = {"function": function, "model": model, "tensor_parallel": tp, "device": None if spec is None else spec.key}
        data = [part.as_data() for part in parts]
        simple = data[0] if len(data) == 1 else {"op": operator.name}
        print_json({**about, **simple, "parts": data if len(data) > 1 else []})
        return
    lines = [f"{function} runs {', then '.join(operator.composed_of)}"] if operator.composed_of else []
    Console().print("\n".join([*lines, *map(str, parts)]), markup=False, highlight=False, soft_wrap=True)


def _spec(device: str) -> DeviceSpec | None:
    if device == "auto":
        import torch

        from gdn.runtime import devices

        return devices.spec(torch.device("cuda")) if torch.cuda.is_available() else None
    return _SPECS.get(device)
