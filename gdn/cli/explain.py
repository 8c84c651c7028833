"""`gdn explain`: the kernels and tiles that an operator would run on a model's shapes, without tensors, for any device.

They are one kernel, those of a composed operator's parts, or those of both phases of a function that tells them apart.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args

import torch
import typer
from rich.console import Console

from gdn import examples
from gdn.cli.plain import print_json
from gdn.device import H100, H200, DeviceSpec
from gdn.models import MODELS, ModelShape
from gdn.ops.indexer_topk import units_per_block
from gdn.problems import DTYPE_BYTES, MqaLogitsProblem, PagedMqaLogitsProblem, Problem, TopkProblem
from gdn.runtime import Choice, devices, env, explain_problem, registry

_SPECS = {"h100": H100, "h200": H200}
_PREFILL_BY_TORCH = "sequences of more than 8 new tokens run on torch where the host knows all lengths"


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
    operator = registry.operator(op)
    function = op if op in operator.functions else next(iter(operator.functions), operator.name)
    spec = _spec(device)
    parts = parts_of(op, MODELS[model].per_rank(tp), spec, backend, fields or [])
    if as_json:
        about = {"function": function, "model": model, "tensor_parallel": tp, "device": None if spec is None else spec.key}
        data = [part.as_data() for part in parts]
        simple = data[0] if len(data) == 1 else {"op": operator.name if operator.composed_of else function}
        print_json({**about, **simple, "parts": data if len(data) > 1 else []})
        return
    lines = [f"{function} runs {', then '.join(operator.composed_of)}"] if operator.composed_of else []
    Console().print("\n".join([*lines, *map(str, parts)]), markup=False, highlight=False, soft_wrap=True)


def _spec(device: str) -> DeviceSpec | None:
    here = device == "auto" and torch.cuda.is_available()
    return devices.spec(torch.device("cuda")) if here else _SPECS.get(device)


@dataclass(frozen=True)
class Part:
    """One kernel that a call runs, or the reference."""

    choice: Choice
    problem: Problem
    notes: tuple[str, ...] = ()  # the composed operator's remarks on this part

    def __str__(self) -> str:
        notes = [f"  note: {note}" for note in self.notes]
        return "\n".join([str(self.choice), *notes, f"  problem: {self.problem}"])

    def as_data(self) -> dict[str, Any]:
        """Data for JSON, under the names of `gdn.explain`'s result."""
        one = self.problem
        problem = {"op": one.op, **one.static_fields(), **one.sizes()}
        return {
            "op": self.choice.op, "backend": self.choice.backend, "config": self.choice.config,
            "config_source": self.choice.config_source, "decided_by": self.choice.decided_by, "switches": self.choice.switches,
            "refusals": dict(self.choice.refusals), "notes": (*self.choice.notes, *self.notes), "problem": problem,
        }  # fmt: skip


def parts_of(
    function: str, shape: ModelShape, spec: DeviceSpec | None, backend: str | None, assignments: Sequence[str]
) -> list[Part]:
    """List the kernels of a public function or operator, in order; ValueError where such a call would raise it.

    assignments: name=value of problem fields.
    """
    operator = registry.operator(function)
    fp8 = env.current().qsa_use_fp8_indexer or function.startswith("fp8_")
    if "topk" in operator.composed_of:
        return _combined(operator, shape, spec, backend, assignments, fp8)
    if operator.name == "attention":
        dense = override(examples.attention(shape), assignments)
        order, ordered_by = _order(operator, backend)
        return [Part(explain_problem(dense, spec, order, ordered_by=ordered_by), dense, (_PREFILL_BY_TORCH,))]
    parts = [registry.operator(name) for name in operator.composed_of] or registry.operators(function)
    problems = [override(one.example(shape, fp8=fp8), assignments) for one in parts]
    order, ordered_by = _order(operator, backend) if operator.composed_of else (backend, None)
    return [Part(explain_problem(problem, spec, order, ordered_by=ordered_by), problem) for problem in problems]


def _order(operator: registry.Operator, backend: str | None) -> tuple[str | None, str | None]:
    """Backend that a composed operator orders for its parts, and the switch that it comes from."""
    own = env.current().backend_of.get(operator.name, "auto")
    return (own, operator.switch) if backend is None and own != "auto" else (backend, None)


def _combined(
    operator: registry.Operator, shape: ModelShape, spec: DeviceSpec | None, backend: str | None, assignments: Sequence[str],
    fp8: bool,
) -> list[Part]:  # fmt: skip
    """Logits and the selection that reads them, for as many rows at a time as the workspace holds."""
    switches = env.current()
    order, ordered_by = _order(operator, backend)
    selected = [assignment for assignment in assignments if assignment.partition("=")[0] == "k"]
    scored = [assignment for assignment in assignments if assignment not in selected]

    scores, selection = (registry.operator(name).example(shape, fp8=fp8) for name in operator.composed_of)
    assert isinstance(scores, MqaLogitsProblem | PagedMqaLogitsProblem) and isinstance(selection, TopkProblem)
    # The selection reads nothing outside a row's range.
    scores = override(dataclasses.replace(scores, clean=False), scored, also=("k",))
    k = override(selection, selected).k
    if isinstance(scores, MqaLogitsProblem):
        units, rows_each, width, starts = scores.num_queries, 1, scores.num_columns, selection.starts_dtype
    else:
        units, rows_each, width, starts = scores.batch, scores.next_n, scores.max_context_len, None
    count, notes = units, []
    if width <= k:
        count, notes = 0, [f"not launched: a row of at most {k} keys lists them all"]
    elif (block := units_per_block(None, 4 * width * rows_each, units)) < units:
        count = block
        workspace = f"VLLM_SPARSE_INDEXER_MAX_LOGITS_MB={switches.sparse_indexer_max_logits_mb}"
        notes = [f"{block * rows_each} of {units * rows_each} rows at a time ({workspace})"]
    scores = dataclasses.replace(scores, **{"num_queries" if isinstance(scores, MqaLogitsProblem) else "batch": count})
    rows = (count or units) * rows_each
    selection = dataclasses.replace(selection, k=k, starts_dtype=starts, num_rows=rows, num_columns=width)
    # A kernel backend is required for the logits only, the reference for both parts.
    of_selection = "reference" if order == "reference" else None
    return [
        Part(explain_problem(scores, spec, order, ordered_by=ordered_by), scores, notes=tuple(notes)),
        Part(explain_problem(selection, spec, of_selection, ordered_by=ordered_by if of_selection else None), selection),
    ]


def override(problem: Any, assignments: Sequence[str], also: tuple[str, ...] = ()) -> Any:
    """The problem with fields changed; ValueError for a field that it lacks or a value of another type.

    also: names that the message lists besides the problem's own."""
    declared = {f.name: f.type for f in dataclasses.fields(problem)}
    changes: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or name not in declared:
            raise ValueError(f"fields: expected name=value with a name of {', '.join((*declared, *also))}, got {assignment!r}")
        changes[name] = _parse(name, declared[name], text)
    return dataclasses.replace(problem, **changes)


def _parse(name: str, kind: Any, text: str) -> Any:
    word = text.lower()
    if kind is bool and word in ("true", "false", "1", "0"):
        return word in ("true", "1")
    if kind is int and word.isdecimal():
        return int(word)
    if type(None) in get_args(kind) and word == "none":
        return None
    if kind not in (bool, int) and word in DTYPE_BYTES:
        return word
    expected = {bool: "true or false", int: "a whole number"}.get(kind, f"one of {', '.join(DTYPE_BYTES)}")
    raise ValueError(f"{name}: expected {expected}, got {text!r}")
