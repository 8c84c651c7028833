"""`gdn compile`: every kernel that a model can reach, in a folder that GDN_CACHE_DIR names where the model is served."""

import json
import os
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gdn import served
from gdn.cli.plain import AsJson, print_json
from gdn.device import SPECS
from gdn.layers.config import HybridConfig
from gdn.layers.named import NAMED
from gdn.runtime import env, reach

_STATES = {"auto": None, "float32": ("float32",), "bfloat16": ("bfloat16",), "both": ("float32", "bfloat16")}


def compile_command(
    model: Annotated[str, typer.Option(help=f"{', '.join(NAMED)}, or the config.json of a checkpoint.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder; kernels that it has already are kept.")],
    tp: Annotated[int, typer.Option(help="Tensor parallel ranks; the kernels of one rank are built.")] = 1,
    num_spec: Annotated[int, typer.Option(help="Most drafts of a sequence (speculative decoding).")] = 0,
    state_dtype: Annotated[
        str, typer.Option(help="Of the recurrent states: float32, bfloat16, both, or auto: what each host takes by itself.")
    ] = "auto",
    host: Annotated[str, typer.Option(help=f"Who calls: {', '.join(served.HOSTS)}, several with commas, or all.")] = "all",
    block_size: Annotated[int, typer.Option(help="Tokens of a cache block of gdn.layers' attention.")] = 64,
    replay: Annotated[
        str | None, typer.Option(help="Kernels of decode with replay: auto, 0 or 1; default: as GDN_REPLAY says.")
    ] = None,
    device: Annotated[str, typer.Option(help="The GPU that will run them: h100 or h200.")] = "h100",
    workers: Annotated[int | None, typer.Option(help="Processes that compile; default: one a CPU.")] = None,
    as_json: AsJson = False,
) -> None:
    """Build every kernel that a model can reach into a folder, without a GPU.

    GDN_CACHE_DIR=FOLDER uses it: with GDN_COMPILE=off nothing is compiled while serving, and a kernel that is missing raises.
    """
    if device not in SPECS:
        raise ValueError(f"device: expected {' or '.join(SPECS)}, got {device!r}")
    if state_dtype not in _STATES:
        raise ValueError(f"state_dtype: expected {', '.join(_STATES)}, got {state_dtype!r}")
    counts = (("num_spec", num_spec, 0, "drafts"), ("block_size", block_size, 1, "tokens"), ("workers", workers, 1, "processes"))
    for name, value, least, what in counts:
        if value is not None and value < least:
            raise ValueError(f"{name}: expected a number of {what} >= {least}, got {value}")
    replay = env.current().replay if replay is None else replay
    hosts = served.HOSTS if host == "all" else tuple(host.split(","))
    if unknown := [one for one in hosts if one not in served.HOSTS]:
        raise ValueError(f"host: expected {', '.join(served.HOSTS)} or all, got {unknown[0]!r}")
    config = config_of(model).per_rank(tp)
    problems = served.of_config(
        config, num_spec=num_spec, state_dtypes=_STATES[state_dtype], hosts=hosts, block_size=block_size, replay=replay
    )
    wanted = reach.kernels(problems, SPECS[device])
    options = {"model": model, "tp": tp, "num-spec": num_spec, "state-dtype": state_dtype, "host": host,
               "block-size": block_size, "replay": replay, "device": device}  # fmt: skip
    command = shlex.join(["gdn", "compile", *(f"--{name}={value}" for name, value in options.items())])
    columns = (TextColumn("kernels"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(wanted))
        reach.build(
            output, wanted, command, workers or os.cpu_count() or 1,
            lambda kernel: progress.update(task, advance=1, description=f"{kernel.op} ({kernel.backend})"),
        )  # fmt: skip
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    if as_json:
        print_json({"folder": str(output), "kernels": len(wanted), "bytes": size, "command": command})
        return
    Console().print(
        f"{len(wanted)} kernels, {size / 1e6:.1f} MB. Serve with GDN_CACHE_DIR={output} GDN_COMPILE=off", soft_wrap=True
    )


def config_of(model: str, argument: str = "model") -> HybridConfig:
    """Configuration of a named model, or of a config.json of Transformers. argument: its name in errors."""
    if model in NAMED:
        return NAMED[model]
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ValueError(f"{argument}: expected one of {', '.join(NAMED)} or a config.json, got {model!r}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{argument}: expected a config.json, got {model!r}, which is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{argument}: expected a config.json, got {model!r}, which holds a {type(content).__name__}")
    try:
        return HybridConfig.from_transformers(content)
    except TypeError as error:  # an entry of the file, not of a caller
        raise ValueError(f"{argument}: {model!r}: {error}") from error
