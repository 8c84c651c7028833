"""The fused prefill step on the GPU, against its reference in float64.

Inputs and pools lie inside larger tensors full of NaN, as in test_gdn_decode: what must not be read poisons the result, what must
not be written is compared bit for bit. The kernels run one after the other ("apart"), or so with the norm in the chunk kernel
("normed"), or side by side, where the parts of a call wait for each other: every case runs in all forms, and what hangs is a
failure too.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise as pairwise_of
from typing import Any

import pytest
import torch

import gdn
from gdn import runtime
from gdn.device import H100
from gdn.runtime import env
from gdn.testing.compare import same_bits
from tests.compile.pairwise import pairwise
from tests.gpu import graphs
from tests.gpu.delta_rule import Arguments
from tests.gpu.framed import StepCase, check_states, check_windows, frame_is_untouched, on_cpu, states, windows
from tests.gpu.test_batch_invariance import Batch
from tests.gpu.twins import twin
from tests.references import reference

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NULL = 0
POOLS = ("conv_states", "ssm_state")
_FEW_ROWS = 16


@dataclass(frozen=True)
class Case(StepCase):
    """A call; everything else follows from the seed."""

    lengths: tuple[int, ...] = (70, 1, 0, 200, 5, 64, 129, 2)  # the fourth is padding
    offsets_dtype: torch.dtype = torch.int32
    has_mask: bool = True
    has_checkpoints: bool = False

    def dead(self) -> list[int]:
        return [3] if len(self.lengths) > 3 else []

    def ignored(self) -> list[int]:
        """Rows of padding."""
        starts = self.starts()
        return [row for n in self.dead() for row in range(starts[n], starts[n + 1])] + list(range(starts[-1], self.tokens))


def make(case: Case, device: torch.device, seed: int = 0) -> Arguments:
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=source).to(dtype).to(device)

    count = len(case.lengths)
    total = 3 * count + 4
    order = (torch.randperm(total - 1, generator=source)[: 3 * count] + 1).view(3, count)
    indices = order[0].clone()
    indices[case.dead()] = NULL
    conv = windows(total, case.channels, case.width - 1, case.order, case.conv_dtype, device)
    ssm = states(case, total, device)
    mask = torch.arange(count) % 3 != 1
    for n in range(count):
        if n not in case.dead() and case.lengths[n] and (mask[n] or not case.has_mask):  # others may hold NaN
            conv[int(indices[n])] = normal(case.channels, case.width - 1, dtype=case.conv_dtype)
            ssm[int(indices[n])] = 0.3 * normal(*ssm.shape[1:], dtype=case.state_dtype)
    checkpoints: Arguments = {}
    if case.has_checkpoints:
        reach = torch.tensor([length // 64 * 64 for length in case.lengths])
        offsets = torch.stack([reach.clamp(max=64), torch.where(reach > 64, reach, 0)], dim=1)
        checkpoints = {"checkpoint_offsets": offsets.to(device), "checkpoint_slots": order[1:].T.to(case.index_dtype).to(device)}
    given = torch.stack([indices, torch.full_like(indices, 9999)], -1).to(case.index_dtype).to(device)
    return {
        **case.arguments(normal, case.ignored(), case.other_dtype, (8, 8)), **checkpoints, "conv_states": conv,
        "ssm_state": ssm, "state_indices": given[..., 0],
        "query_start_loc": torch.tensor(case.starts(), dtype=case.offsets_dtype, device=device),
        "has_initial_state": mask.to(device) if case.has_mask else None, "null_slot": NULL,
    }  # fmt: skip


def heads_error(got: Tensor, exact: Tensor) -> Tensor:
    """Relative error of each head, [tokens, HV, V]."""
    return (got.double() - exact).pow(2).sum((0, 2)).sqrt() / exact.pow(2).sum((0, 2)).sqrt().clamp(min=1e-9)


def judge(case: Case, before: Arguments, arguments: Arguments) -> None:
    """arguments: as the kernel left them; before: the same before it ran."""
    exact, narrow = on_cpu(before, wide=True), on_cpu(before, wide=False)
    expected, rounded = reference.fused_gdn_prefill(**exact), reference.fused_gdn_prefill(**narrow)
    out, (_, heads), (_, v_dim), starts = arguments["out"], case.heads, case.dims, case.starts()
    assert bool((out[case.ignored()] == 0).all()), "padding is not zero"
    live = {n: list(range(*span)) for n, span in enumerate(pairwise_of(starts)) if n not in case.dead() and span[0] < span[1]}
    # An error over a few values is chance: short sequences are judged together, and each by itself within twice the limit.
    judged = [([n], rows, 1 if len(rows) >= _FEW_ROWS else 2) for n, rows in live.items()]
    short = [n for n, rows in live.items() if len(rows) < _FEW_ROWS]
    judged += [(short, [row for n in short for row in live[n]], 1)] if short else []
    for sequences, rows, times in judged:
        parts = [x[rows].cpu().unflatten(1, (heads, v_dim)) for x in (out, expected, rounded)]
        error, own = heads_error(parts[0], parts[1]), heads_error(parts[2].double(), parts[1])
        assert bool((error <= times * (2 * own + 3e-3)).all()), (
            f"sequences {sequences}: {error.max():.1e}, torch's {own.max():.1e}"
        )
    frame_is_untouched(out)
    check_windows(before["conv_states"], arguments["conv_states"], narrow["conv_states"])
    check_states(before["ssm_state"], arguments["ssm_state"], exact["ssm_state"], 1e-2)


def run(case: Case, device: torch.device, seed: int = 0) -> Arguments:
    arguments = make(case, device, seed)
    before = twin(arguments)
    assert gdn.fused_gdn_prefill(**arguments, backend="cute") is arguments["out"]
    torch.cuda.synchronize()
    judge(case, before, arguments)
    return arguments


Configure = Callable[..., None]
FORM_NAMES = [
    "apart", "side by side", "side by side, few clusters", "normed", "normed, few clusters", "normed, short",
    "normed, short, few clusters", "normed, one token", "side by side, one token", "side by side, one token, few clusters",
    "segments, one token", "segments, one token, few slots",
]  # fmt: skip
FORMS = pytest.mark.parametrize("form", FORM_NAMES)
# One sequence after the other with two SMs a head, which is what the other forms have.
PLAIN = {"stages": 4, "prefetch": 0, "num_four_sm_clusters": 0, "max_l2_ring_groups": 0, "split_chunks": 0,
         "split_if_longest_exceeds": 0, "num_persistent_clusters": 0}  # fmt: skip

NORMED = PLAIN | {"norm_in_chunk": 1, "conv_rows": 16, "conv_threads": 64}
SEGMENTS = PLAIN | {"split_chunks": 2, "num_persistent_clusters": 3, "conv_rows": 16, "conv_threads": 64}


def force_form(patch: pytest.MonkeyPatch, form: str, **changes: int) -> None:
    """The operator runs in that form, and remembers no call. changes: of its configuration."""
    module = importlib.import_module("kernels_cute.gdn_prefill")

    def prepare(problem: Any, device: torch.device, backend: str) -> runtime.Prepared:
        space = module.configs(problem, H100)
        side = [config for config in space if config.num_conv_blocks]
        apart = [config for config in space if not config.num_conv_blocks and not config.norm_in_chunk]
        config = (side if "side by side" in form and side else apart)[0]  # other head dims have no form but apart
        if "normed" in form:
            clusters = 3 if "few" in form else 0
            normed = replace(config, **NORMED | {"num_persistent_clusters": clusters})
            config = normed if module.fits(problem, normed, H100) else config  # z wider than the rows is not served
        if "segments" in form:
            slots = 2 if "few" in form else max(problem.num_sequences, 2)  # of longer sequences; more of them are whole
            segments = replace(config, **SEGMENTS | {"max_long_sequences": slots})
            config = segments if module.fits(problem, replace(segments, max_short_tokens=1), H100) else config
        most = 64 if "short" in form else int("one token" in form)
        short = replace(config, max_short_tokens=most)
        if most and module.fits(problem, short, H100):
            config = short
        elif most:  # nothing but these has no such launches
            is_normed = problem.has_norm and problem.z_dtype in (None, problem.dtype)
            assert problem.head_k_dim != 128 or "normed" in form and not is_normed
        config = replace(config, **changes)
        if config.num_conv_blocks:
            config = replace(config, num_persistent_clusters=3 if "few" in form else 0)
        assert module.fits(problem, config, H100)
        return runtime.prepare(problem, device, backend, config=config)

    patch.setattr(importlib.import_module("gdn.ops.layer_step.prefill"), "prepare", prepare)
    env.reload()  # forgets calls seen before


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Configure:
    """configure(form, **changes) is `force_form` of this test."""
    return partial(force_form, monkeypatch)


AXES: dict[str, Any] = {
    "heads": [(2, 4), (1, 1), (2, 6), (1, 4)],
    "dims": [(128, 128), (64, 64), (96, 96)],
    "dtype": [BF16, F16],
    "other_dtype": [BF16, F32],
    "weight_dtype": [BF16, F32],
    "bias_dtype": [None, F32, BF16],
    "width": [4, 3, 2],
    "activation": ["silu", None],
    "gate_activation": ["silu", "sigmoid"],
    "has_norm": [True, False],
    "layout": ["flat", "interleaved", "merged"],
    "conv_dtype": [BF16, F32],
    "order": ["channels", "columns", "neither"],
    "state_dtype": [F32, BF16],
    "v_first": [True, False],
    "index_dtype": [torch.int32, torch.int64],
    "offsets_dtype": [torch.int32, torch.int64],
    "has_mask": [True, False],
    "has_checkpoints": [False, True],
}
CASES = [Case(**row) for row in pairwise(AXES, lambda row: True)]


def name(case: Case) -> str:
    values = [getattr(case, field) for field in AXES]
    return "-".join(str(value).removeprefix("torch.").replace(" ", "") for value in values)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_variants(case: Case, device: torch.device) -> None:
    run(case, device)


FORM_CASES = [
    replace(case, dims=(128, 128), layout=layout) for layout, step in (("flat", 3), ("merged", 6)) for case in CASES[::step]
]


@FORMS
@pytest.mark.parametrize("case", FORM_CASES, ids=name)
def test_forms(case: Case, form: str, configure: Configure, device: torch.device) -> None:
    configure(form)
    run(case, device)


SHAPES: dict[str, tuple[int, ...]] = {
    "one token": (1,), "two tokens": (2,), "a chunk": (64,), "more than one": (65,), "nothing first": (0, 0, 3),
    "decode rows, then prompts": (1,) * 9 + (300, 1, 64), "all of one token": (1,) * 40, "long": (3000,), "many": (37,) * 60,
    "ragged": (1000, 3, 64, 63, 128, 500, 1, 0, 77), "nothing afterwards": (200, *(0,) * 30),
    "more than are sorted": (*(1, 20) * 150, 300, *(1, 70) * 10),
}  # fmt: skip


@FORMS
@pytest.mark.parametrize("shape", SHAPES)
def test_lengths(shape: str, form: str, configure: Configure, device: torch.device) -> None:
    configure(form)
    run(Case(lengths=SHAPES[shape], has_checkpoints=shape == "ragged"), device)


@pytest.mark.parametrize(
    ("form", "rows"),
    [(form, rows) for form in ("side by side", "side by side, few clusters") for rows in (8, 16, 32, 64)],
)
@pytest.mark.parametrize("conv_blocks", [2, 20, 64])
def test_tiles_of_the_convolution(form: str, rows: int, conv_blocks: int, configure: Configure, device: torch.device) -> None:
    configure(form, conv_rows=rows, num_conv_blocks=conv_blocks)
    run(Case(lengths=(200, 1, 64, 30, 700), heads=(4, 8)), device)


@pytest.mark.parametrize("threads", [64, 128])
@pytest.mark.parametrize("rows", [8, 32])
def test_tiles_of_the_staged_convolution(threads: int, rows: int, configure: Configure, device: torch.device) -> None:
    configure("normed", conv_rows=rows, conv_threads=threads)
    run(Case(lengths=(200, 1, 64, 30, 700, 0, 3, 128), heads=(4, 8)), device)


def same(first: Arguments, second: Arguments) -> bool:
    return all(same_bits(first[name], second[name]) for name in ("out", *POOLS))


@pytest.mark.parametrize(("lengths", "has_short"), [((300, 1, 1000, 64, 70), False), ((300, 2, 1000, 64, 70), True)], ids=str)
def test_the_forms_give_the_same_bits(
    lengths: tuple[int, ...], has_short: bool, configure: Configure, device: torch.device
) -> None:
    """All forms have two SMs a head: what runs at the same time changes nothing. Only a short sequence of one token has another
    rule."""
    found = []
    for form, changes in (
        ("apart", PLAIN), ("side by side", {}), ("side by side, few clusters", {}),
        ("side by side", {"conv_rows": 16, "num_conv_blocks": 20}),
        ("normed", {}), ("normed, few clusters", {}), ("normed", {"conv_threads": 128}),
        # Segments compose states, in other bits.
        *((form, {}) for form in FORM_NAMES[5:] if has_short and "segments" not in form),
    ):  # fmt: skip
        configure(form, **changes)
        found.append(run(Case(lengths=lengths, heads=(4, 8)), device))
    assert all(same(found[0], other) for other in found[1:])


@FORMS
def test_repeated_calls_give_the_same_bits(form: str, configure: Configure, device: torch.device) -> None:
    """Thirty calls in a row, without a pause between them: their launches overlap as far as they may."""
    configure(form)
    arguments = make(Case(lengths=(500, 1, 64, 3, 1200), heads=(4, 8)), device)
    sets = [twin(arguments) for _ in range(30)]
    for one in sets:
        gdn.fused_gdn_prefill(**one, backend="cute")
    torch.cuda.synchronize()
    assert all(same(sets[0], other) for other in sets[1:])


@FORMS
def test_a_sequence_alone(form: str, configure: Configure, device: torch.device) -> None:
    """The same bits as in a batch, where both take the same form."""
    configure(form, **(PLAIN if form.startswith("apart") else {}))
    case = Case(lengths=(200, 65, 700, 20, 1), padding=0, has_mask=False)
    batch = Batch(
        "fused_gdn_prefill", make(case, device) | {"out": None}, case.lengths, "query_start_loc",
        tokens=("mixed_qkv", "z", "b", "a"), sequences=("state_indices",), pools=POOLS, slots="state_indices",
    )  # fmt: skip
    batch.check_alone(range(5), "cute")


@FORMS
def test_graphs(form: str, configure: Configure, device: torch.device) -> None:
    """A captured step, replayed with other inputs and lengths, back to back with itself."""
    configure(form)
    case, changes = Case(lengths=(300, 64, 1, 0, 500), heads=(4, 8)), []
    for seed, lengths in enumerate(((300, 64, 1, 0, 500), (1, 1, 700, 0, 163), (865, 0, 0, 0, 0))):
        run(replace(case, lengths=lengths), device, seed)
        changes.append(graphs.tensors(make(replace(case, lengths=lengths), device, seed)))
    graphs.check(gdn.fused_gdn_prefill, make(case, device), POOLS, changes, device, times=5, backend="cute")


@FORMS
def test_other_work_on_the_device(form: str, configure: Configure, device: torch.device) -> None:
    """Two streams run the step at once, next to products that take all SMs in turns."""
    configure(form)
    sets = [make(Case(lengths=(400, 1, 900), heads=(4, 8)), device, seed) for seed in (0, 1)]
    wanted = [twin(one) for one in sets]
    for one in wanted:
        gdn.fused_gdn_prefill(**one, backend="cute")
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    matrix = torch.randn(4096, 4096, device=device, dtype=BF16)
    trials = [[twin(one) for one in sets] for _ in range(10)]
    torch.cuda.synchronize()
    for trial in trials:
        for stream, one in zip(streams, trial, strict=False):
            with torch.cuda.stream(stream):
                gdn.fused_gdn_prefill(**one, backend="cute")
        with torch.cuda.stream(streams[2]):
            matrix = (matrix @ matrix).clamp(-1, 1)
    torch.cuda.synchronize()
    assert all(same(one, want) for trial in trials for one, want in zip(trial, wanted, strict=True))


@pytest.mark.parametrize("others", [(1,) * 8, (1, 0, 1, 1), (1, 7, 30, 1), (70, 3, 128, 1)], ids=str)
@pytest.mark.parametrize("known", [True, False])
def test_one_long_sequence(known: bool, others: tuple[int, ...], device: torch.device) -> None:
    """The default where the host knows of it, and where it does not; eager, repeated, and with less than the length."""
    case = Case(lengths=(*others, 2500, *others), heads=(4, 8))
    arguments = make(case, device)
    sets = [twin(arguments) for _ in range(4)]
    for one, longest in zip(sets, (2500, 2500, 9999, 64), strict=True):
        gdn.fused_gdn_prefill(**one, backend="cute", max_seqlen=longest if known else None)
        torch.cuda.synchronize()
        judge(case, arguments, one)
    assert same(sets[0], sets[1])


@pytest.mark.parametrize("longest", [2500, 2530])
def test_more_long_sequences_than_the_host_tells_of(longest: int, device: torch.device) -> None:
    """With the tokens of the longest as they are, and with a few more: then most of the others seem to be of one token, and the
    launches of segments have too few blocks."""
    case = Case(lengths=(*[3] * 10, 2500, *[3] * 10), heads=(4, 8))
    arguments = make(case, device)
    given = twin(arguments)
    gdn.fused_gdn_prefill(**given, backend="cute", max_seqlen=longest)
    torch.cuda.synchronize()
    judge(case, arguments, given)
