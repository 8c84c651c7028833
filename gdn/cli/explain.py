"""`gdn explain`: the kernels and tiles that an operator would run on a model's shapes, without tensors, for any device.

They are one kernel, those of a composed operator's parts, or those of both phases of a function that tells them apart.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from gdn.cli.explain_arguments import taken
from gdn.cli.plain import AsJson, print_json, wrapped
from gdn.core.explain import notes_of
from gdn.device import SPECS, DeviceSpec
from gdn.layers.named import NAMED
from gdn.models import ModelShape
from gdn.ops.attention import examples
from gdn.ops.indexer.indexer_topk import units_per_block
from gdn.ops.indexer.problem import MqaLogitsProblem, PagedMqaLogitsProblem, TopkProblem
from gdn.problem import Problem
from gdn.runtime import Choice, devices, env, explain_problem, registry
from gdn.served import shape_of

_OF_INDEXERS = "gdn.ops.indexer.cases"  # of operators that only models with an indexer run
_OF_DECODE = "sequences of at most 8 new tokens"
_OF_PREFILL = "longer sequences; where the kernel refuses and the host knows all lengths, they run on torch"
_BY_TORCH = "longer sequences run on torch where the host knows all lengths"


def explain_command(
    op: Annotated[str, typer.Argument(help="A public function of gdn, or an operator's short name such as chunk.")],
    fields: Annotated[
        list[str] | None,
        typer.Argument(
            help="What to change, as name=value: a field of the printed problem (head_k_dim=96), or an argument of the function, "
            "of a tensor its dtype, given or none (beta=float32, num_accepted_tokens=given).",
        ),
    ] = None,
    model: Annotated[str, typer.Option(help=f"Shapes: {', '.join(NAMED)}.")] = "qwen3-next-80b",
    tp: Annotated[int, typer.Option(help="Tensor parallel ranks; the shapes of one rank are taken.")] = 1,
    device: Annotated[str, typer.Option(help="auto (this machine's), h100, h200 or cpu.")] = "auto",
    backend: Annotated[str | None, typer.Option(help="As the function's argument: tilelang, cute or reference.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say which kernels and tiles an operator would run, and why."""
    if model not in NAMED:
        raise typer.BadParameter(f"expected one of {', '.join(NAMED)}, got {model!r}", param_hint="--model")
    if device not in ("auto", "cpu", *SPECS):
        raise typer.BadParameter(f"expected auto, h100, h200 or cpu, got {device!r}", param_hint="--device")
    operator = registry.operator(op)
    function = op if op in operator.functions else next(iter(operator.functions), operator.name)
    spec = _spec(device)
    if NAMED[model].index_topk == 0 and _is_of_indexers(operator):
        raise ValueError(f"model: expected one with an indexer, which {function} is a part of, got {model}")
    parts = parts_of(op, shape_of(model, NAMED[model]).per_rank(tp), spec, backend, fields or [], NAMED[model].index_ratio)
    if as_json:
        about = {"function": function, "model": model, "tensor_parallel": tp, "device": None if spec is None else spec.key}
        data = [part.as_data() for part in parts]
        simple = data[0] if len(data) == 1 else {"op": operator.name if operator.composed_of else function}
        print_json({**about, **simple, "parts": data if len(data) > 1 else []})
        return
    is_without = device == "auto" and spec is None
    hint = ["There is no Hopper GPU here: --device h100 says what would run on an H100."] if is_without else []
    joint = " and " if operator.name == "attention" else ", then "  # it deals sequences to its parts
    lines = [f"{function} runs {joint.join(operator.composed_of)}"] if operator.composed_of else []
    console = Console()
    text = "\n".join([*lines, *map(str, parts), *hint])
    rows = "\n".join(wrapped(line, console.width) for line in text.splitlines())
    console.print(rows, markup=False, highlight=False, soft_wrap=True)


def _is_of_indexers(operator: registry.Operator) -> bool:
    """Whether the operator, or one of its parts, belongs to an indexer or reads its selection."""
    parts = [registry.operator(name) for name in operator.composed_of] or [operator]
    if operator.name == "attention":
        return False
    return any(
        part.name.startswith("sparse_attention") or (part.family is not None and part.family.cases == _OF_INDEXERS)
        for part in parts
    )


def _spec(device: str) -> DeviceSpec | None:
    here = device == "auto" and torch.cuda.is_available()
    return devices.spec(torch.device("cuda")) if here else SPECS.get(device)


@dataclass(frozen=True)
class Part:
    """One kernel that a call runs, or the reference."""

    choice: Choice
    problem: Problem
    notes: tuple[str, ...] = ()  # the composed operator's remarks on this part
    spec: DeviceSpec | None = None  # of the device

    def __str__(self) -> str:
        notes = [f"  note: {note}" for note in (*self.notes, *notes_of(self.problem, self.spec))]
        return "\n".join([str(self.choice), *notes, f"  problem: {self.problem}"])

    def as_data(self) -> dict[str, Any]:
        """Data for JSON, under the names of `gdn.explain`'s result."""
        one = self.problem
        problem = {"op": one.op, **one.static_fields(), **one.sizes()}
        return {
            "op": self.choice.op, "backend": self.choice.backend, "config": self.choice.config,
            "config_source": self.choice.config_source, "decided_by": self.choice.decided_by, "switches": self.choice.switches,
            "refusals": dict(self.choice.refusals), "lost": dict(self.choice.lost),
            "notes": (*self.choice.notes, *self.notes, *notes_of(one, self.spec)), "problem": problem,
        }  # fmt: skip


def parts_of(
    function: str, shape: ModelShape, spec: DeviceSpec | None, backend: str | None, assignments: Sequence[str], ratio: int = 1
) -> list[Part]:
    """List the kernels of a public function or operator, in order; ValueError where such a call would raise it.

    assignments: name=value of problem fields, or of arguments of the function. ratio: tokens of a row of the indexer's cache.
    """
    operator = registry.operator(function)
    public = function if function in operator.functions else next(iter(operator.functions), None)
    fp8 = env.current().qsa_use_fp8_indexer or function.startswith("fp8_")
    if "topk" in operator.composed_of:
        return _combined(operator, shape, spec, backend, assignments, fp8, ratio)
    if operator.name == "attention":
        return _attention(operator, shape, spec, backend, assignments)
    parts = [registry.operator(name) for name in operator.composed_of] or registry.operators(function)
    examples_of: list[Any] = [one.example(shape, fp8=fp8) for one in parts]
    if ratio > 1:
        examples_of = [_grouped(one, ratio) if isinstance(one, TopkProblem) else one for one in examples_of]
    problems, notes = taken(examples_of, assignments, public)
    order, ordered_by = _order(operator, backend) if operator.composed_of else (backend, None)
    return [Part(explain_problem(problem, spec, order, ordered_by=ordered_by), problem, notes, spec) for problem in problems]


def _attention(
    operator: registry.Operator, shape: ModelShape, spec: DeviceSpec | None, backend: str | None, assignments: Sequence[str]
) -> list[Part]:
    """The kernels of decode and of prefill."""
    problems, notes = taken([examples.attention(shape), examples.attention_prefill(shape)], assignments, operator.name)
    order, ordered_by = _order(operator, backend)
    remarks = [_OF_DECODE, _OF_PREFILL]
    if order not in (None, "reference", *registry.operator("attention_prefill").modules):
        problems, remarks = problems[:1], [_BY_TORCH]
    return [
        Part(explain_problem(problem, spec, order, ordered_by=ordered_by), problem, (remark, *notes))
        for problem, remark in zip(problems, remarks, strict=True)
    ]


def _grouped(selection: TopkProblem, ratio: int) -> TopkProblem:
    """The selection of groups of tokens, which lists their tokens."""
    return dataclasses.replace(selection, k=selection.k // ratio, ratio=ratio, position_dtype="int64")


def _order(operator: registry.Operator, backend: str | None) -> tuple[str | None, str | None]:
    """Backend that a composed operator orders for its parts, and the switch that it comes from."""
    own = env.current().backend_of.get(operator.name, "auto")
    return (own, operator.switch) if backend is None and own != "auto" else (backend, None)


def _combined(
    operator: registry.Operator, shape: ModelShape, spec: DeviceSpec | None, backend: str | None, assignments: Sequence[str],
    fp8: bool, ratio: int,
) -> list[Part]:  # fmt: skip
    """Logits and the selection that reads them, for as many rows at a time as the workspace holds."""
    switches = env.current()
    order, ordered_by = _order(operator, backend)
    scores, selection = (registry.operator(name).example(shape, fp8=fp8) for name in operator.composed_of)
    assert isinstance(scores, MqaLogitsProblem | PagedMqaLogitsProblem) and isinstance(selection, TopkProblem)
    of_scores, of_selection, workspace_bytes = _dealt(assignments)
    # The selection reads nothing outside a row's range.
    (scores,), notes_of_scores = taken([dataclasses.replace(scores, clean=False)], of_scores, operator.functions[0], also=("k",))
    (selection,), _ = taken([_grouped(selection, ratio) if ratio > 1 else selection], of_selection)
    k = selection.k
    if isinstance(scores, MqaLogitsProblem):
        units, rows_each, width, starts = scores.num_queries, 1, scores.num_columns, selection.starts_dtype
    else:
        units, rows_each, width, starts = scores.batch, scores.next_n, scores.max_context_len, None
    count, notes = units, list(notes_of_scores)
    if width <= k:
        count = 0
        notes.append(f"not launched: a row of at most {k} keys lists them all")
    elif (block := units_per_block(workspace_bytes, 4 * width * rows_each, units)) < units:
        count = block
        workspace = f"VLLM_SPARSE_INDEXER_MAX_LOGITS_MB={switches.sparse_indexer_max_logits_mb}"
        workspace = workspace if workspace_bytes is None else f"workspace_bytes={workspace_bytes}"
        notes.append(f"{block * rows_each} of {units * rows_each} rows at a time ({workspace})")
    scores = dataclasses.replace(scores, **{"num_queries" if isinstance(scores, MqaLogitsProblem) else "batch": count})
    rows = (count or units) * rows_each
    selection = dataclasses.replace(selection, starts_dtype=starts, num_rows=rows, num_columns=width)
    # A kernel backend is required for the logits only, the reference for both parts.
    asked = "reference" if order == "reference" else None
    return [
        Part(explain_problem(scores, spec, order, ordered_by=ordered_by), scores, notes=tuple(notes)),
        Part(explain_problem(selection, spec, asked, ordered_by=ordered_by if asked else None), selection),
    ]


def _dealt(assignments: Sequence[str]) -> tuple[list[str], list[str], int | None]:
    """Assignments that concern the scores, those that concern the selection, and the bytes of the workspace."""
    of_scores: list[str] = []
    of_selection: list[str] = []
    workspace_bytes: int | None = None
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        if name == "workspace_bytes" and text.isdecimal():
            workspace_bytes = int(text)
        elif name == "topk" or (name == "k" and text.isdecimal()):
            of_selection.append(f"k={text}")
        elif name == "positions":
            of_selection.append(f"position_dtype={text}")
        else:
            (of_selection if name == "ratio" else of_scores).append(assignment)
    return of_scores, of_selection, workspace_bytes
