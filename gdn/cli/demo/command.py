"""`gdn demo`: a hybrid model prefills a ragged batch, verifies drafts and decodes; every step is checked against another way."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from gdn.cli.demo import ranks
from gdn.cli.demo.report import device_name, print_report, versions
from gdn.cli.demo.run import VERIFIED, Plan, Report, run
from gdn.cli.plain import AsJson, print_json, warn, wrapped
from gdn.core.check import dtype_name
from gdn.layers import HybridModel
from gdn.layers.loading import SafetensorsFolder, from_transformers, read_config
from gdn.layers.named import NAMED, first_layers
from gdn.ops.delta_rule.crossing import replay_rule, replays
from gdn.runtime import env
from gdn.testing.timing import Limits, measure_limits

# Prompt lengths: ragged, with multiples of a chunk, a length below the convolution's window, and on a GPU a long prompt.
LONG_LENGTHS = (37, 4000, 511, 2048, 2, 64, 1530)
SHORT_LENGTHS = (37, 129, 64, 2, 20)
GPU_STEPS, CPU_STEPS = 64, 8
LAYERS = 4
BATCH = 128  # of the steps that are timed with replay and without
MANY_BYTES = 4 * 10**9  # of weights on a CPU: more are announced


def demo(
    model: Annotated[
        str | None, typer.Option(help=f"{', '.join(NAMED)}; without a GPU tiny is the default.", show_default="qwen3-next-80b")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of the model, its first ones.", show_default=f"{LAYERS}; a checkpoint's all")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder of a Transformers checkpoint (config.json, *.safetensors).")
    ] = None,
    tp: Annotated[
        int, typer.Option(min=1, help="Tensor-parallel ranks: torchrun's processes; without torchrun the first rank runs alone.")
    ] = 1,
    cp: Annotated[int, typer.Option(min=1, help="Context-parallel ranks of prefill, under torchrun: tp * cp processes.")] = 1,
    device: Annotated[str, typer.Option(help="'cuda', 'cpu', or 'auto': a GPU if there is one.")] = "auto",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Decode steps.", show_default=f"{GPU_STEPS}; {CPU_STEPS} on a CPU")
    ] = None,
    drafts: Annotated[int, typer.Option(min=1, max=7, help="Drafts of a speculative step.")] = 3,
    replay: Annotated[
        str | None, typer.Option(help="Decode by replay: 0, 1, or auto, where it is faster.", show_default="GDN_REPLAY")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Sequences of the steps that are timed with replay and without; 0: none.",
            show_default=f"{BATCH}; 0 on a CPU",
        ),
    ] = None,
    eager: Annotated[bool, typer.Option("--eager", help="Decode without CUDA graphs.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights, prompts and drafts.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Prefill, verify drafts and decode with a hybrid model; check every operator, and the model against a reference.

    The operators' calls are checked in prefill, two speculative and two decode steps (on a CPU in all), the logits in every step.
    """
    if cp > 1 and not ranks.are_launched():
        raise typer.BadParameter(f"expected 1 without torchrun, got {cp}", param_hint="--cp")
    if replay not in (None, "auto", "0", "1"):
        raise typer.BadParameter(f"expected auto, 0 or 1, got {replay!r}", param_hint="--replay")
    plan = replace(_plan(model, layers, checkpoint, tp, device, steps, drafts, seed), eager=eager, context_parallel=cp)
    has_replay, why = _replay(plan, replay)
    plan = replace(plan, replay=has_replay, batch=(BATCH if plan.device.type == "cuda" else 0) if batch is None else batch)
    if plan.device.type == "cpu" and plan.name == "tiny":
        torch.set_num_threads(1)  # threads that wait for each other take longer than the tiny model's products
    with ranks.joined(tp * cp, plan.device) as group:
        is_first = group is None or group.rank() == 0
        console = Console(quiet=as_json or not is_first)
        if is_first and plan.device.type == "cpu" and (weights := weight_bytes(plan)) > MANY_BYTES:
            size = f"{weights / 1e9:.1f} GB in {dtype_name(plan.dtype)}"
            fewer = "--model tiny takes seconds, fewer --layers less memory"
            warn(f"{plan.name}'s weights, {size}, go into this machine's memory, and the model runs on its CPU; {fewer}")
        limits = None
        if plan.device.type == "cuda":
            limits = measure_limits()
            torch.cuda.empty_cache()
        for line in _head(plan, limits, why, alone=group is None):
            console.print(wrapped(line, console.width), highlight=False, markup=False)
        started = time.perf_counter()
        with Progress(
            SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True, disable=console.quiet
        ) as progress:
            task = progress.add_task("weights")
            report = run(plan, limits, lambda row: progress.update(task, description=f"{row.phase} {row.operator}"), group)
        if is_first and as_json:
            print_json(_data(plan, report))
        elif is_first:
            print_report(console, report, dtype_name(plan.dtype), time.perf_counter() - started, plan.device)
    raise typer.Exit(0 if report.passed else 1)


def _plan(
    model: str | None, layers: int | None, checkpoint: Path | None, tp: int, device: str, steps: int | None, drafts: int,
    seed: int,
) -> Plan:  # fmt: skip
    """The options, checked, with their defaults."""
    if device not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"expected auto, cpu or cuda, got {device!r}", param_hint="--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("cuda was asked for and torch sees no GPU", param_hint="--device")
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if checkpoint is not None:
        if model is not None:
            raise typer.BadParameter("expected none with --checkpoint, which says what the model is", param_hint="--model")
        name, config = checkpoint.name, read_config(checkpoint)
    else:
        name = model or ("qwen3-next-80b" if on_gpu else "tiny")
        if name not in NAMED:
            raise typer.BadParameter(f"expected one of {', '.join(NAMED)}, got {name!r}", param_hint="--model")
        config, layers = NAMED[name], LAYERS if layers is None else layers
    try:
        config = config if layers is None else first_layers(config, layers)
        config.per_rank(tp)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--tp" if tp > 1 else "--layers") from error
    if checkpoint is not None:  # its files and the names of its tensors are checked before anything is printed
        from_transformers(SafetensorsFolder(checkpoint), config, only_first_layers=True)
    is_long = on_gpu and max(LONG_LENGTHS) < config.max_position_embeddings
    plan = Plan(
        name, config, LONG_LENGTHS if is_long else SHORT_LENGTHS, steps or (GPU_STEPS if on_gpu else CPU_STEPS), drafts,
        ranks.own_device(torch.device("cuda" if on_gpu else "cpu")), tp, seed, checkpoint,
    )  # fmt: skip
    if plan.sizes.max_seq_len > config.max_position_embeddings:
        most = config.max_position_embeddings - plan.sizes.max_seq_len + plan.steps
        raise typer.BadParameter(f"expected at most {most}, which the model's positions allow", param_hint="--steps")
    return plan


def weight_bytes(plan: Plan) -> int:
    """Bytes of the weights that this process holds."""
    model = HybridModel(plan.config.per_rank(plan.tensor_parallel), device="meta", dtype=plan.dtype)
    return sum(one.nbytes for one in model.parameters())


def _head(plan: Plan, limits: Limits | None, why: str, *, alone: bool) -> list[str]:
    """Lines that say what will run and where: the model's shapes, the batch, and what is generated. why: replay is on or off."""
    config = plan.config.per_rank(plan.tensor_parallel)
    dtype = dtype_name(plan.dtype)
    weights = "random weights" if plan.checkpoint is None else f"weights of {plan.checkpoint}"
    kinds = f"{config.num_linear_layers} of Gated DeltaNet, {config.num_full_layers} of attention"
    heads = f"{config.linear_num_key_heads} q and k heads of {config.linear_key_head_dim}"
    heads += f", {config.linear_num_value_heads} v heads of {config.linear_value_head_dim}"
    attention = f"{config.num_attention_heads} heads of {config.head_dim}, {config.num_key_value_heads} for keys"
    index = "no indexer"
    if config.index_topk:
        groups = f" over groups of {config.index_ratio}" if config.index_ratio > 1 else ""
        kind = "FP8" if env.current().qsa_use_fp8_indexer else dtype
        index = f"indexer with {config.index_n_heads} heads of {config.index_head_dim}{groups}, top {config.index_topk}, "
        index += f"cache and logits in {kind} (VLLM_QSA_USE_FP8_INDEXER)"
    where = "No GPU in use: the plain-torch reference runs, without times of operators."
    if limits is not None:
        rates = f"bf16 {limits.bf16_tflops:.0f}, fp8 {limits.fp8_tflops:.0f} TFLOP/s"
        where = f"{torch.cuda.get_device_name()}: copy {limits.copy_gbps / 1e3:.2f} TB/s, {rates}"
    ranks = f"{plan.tensor_parallel} tensor-parallel rank{'s' if plan.tensor_parallel > 1 else ''}"
    ranks = f", one of {ranks}" if alone else f", on all {ranks}"
    if alone and plan.tensor_parallel == 1:
        ranks = ""
    if plan.context_parallel > 1:
        ranks += f" times {plan.context_parallel} context-parallel ranks"
    return [
        where,
        f"{plan.name}{ranks}, {weights}, {dtype}; hidden size {config.hidden_size}",
        f"  {config.num_hidden_layers} layers: {kinds}; {_mlp(plan)}",
        f"  Gated DeltaNet: {heads}, convolution of width {config.linear_conv_kernel_dim}, float32 states",
        f"  attention: {attention}; {index}",
        f"  prefill: {len(plan.lengths)} prompts of {', '.join(map(str, plan.lengths))} tokens in one ragged batch",
        f"  replay decode: {'on' if plan.replay else 'off'} ({why})",
        f"  verify: {VERIFIED} steps of up to {plan.drafts} drafts for each sequence; decode: {plan.steps} steps of one token",
    ]


def _replay(plan: Plan, option: str | None) -> tuple[bool, str]:
    """Whether decode is by replay, and why."""
    value, given = env.current().replay if option is None else option, "GDN_REPLAY" if option is None else "--replay"
    if value != "auto":
        return value == "1", f"{given}={value}"
    config = plan.config.per_rank(plan.tensor_parallel)
    heads, dims = config.linear_num_value_heads, (config.linear_key_head_dim, config.linear_value_head_dim)
    return replays(heads, dims, len(plan.lengths), plan.drafts), replay_rule("auto").removeprefix("GDN_REPLAY=")


def _mlp(plan: Plan) -> str:
    config = plan.config
    if not config.num_experts:
        return f"dense MLPs of width {config.intermediate_size}"
    return f"{config.num_experts} experts of width {config.moe_intermediate_size}, {config.num_experts_per_tok} for a token"


def _data(plan: Plan, report: Report) -> dict[str, Any]:
    """The report as JSON shows it."""
    return {
        "model": plan.name, "layers": plan.config.num_hidden_layers, "tensor_parallel": plan.tensor_parallel,
        "context_parallel": plan.context_parallel,
        "ranks": 1 + len(report.others), "device": plan.device.type, "dtype": dtype_name(plan.dtype),
        "captured": report.captured, "passed": report.passed, "device_name": device_name(plan.device), "versions": versions(),
        "phases": [{**vars(one), "tokens_per_second": one.tokens_per_second} for one in report.speeds],
        "calls": [{**vars(one), "passed": one.passed} for one in report.rows],
        "memory": report.memory, "replay": report.has_replay,
        "sequence_bytes": [{**vars(one), "share": one.share} for one in report.sequences],
        "steps": [{**vars(one), "ratio": one.ratio} for one in report.steps],
        "deviations": [{**vars(one), "passed": one.passed} for one in report.deviations],
        "tokens": report.tokens, "wrong_on_other_ranks": sum(report.others),
    }  # fmt: skip
