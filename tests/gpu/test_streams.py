"""Calls on several streams at once: no operator hands to one stream what another is still writing.

What operators keep on the device between calls (`gdn.core.constants`) is filled on the stream of the first call. These tests
hold that stream back while another one calls, drop what is kept while a kernel still has to read it, and run two streams
against each other.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import gdn
from gdn.core import constants
from gdn.ops.delta_rule.inputs import recurrent_inputs
from gdn.runtime import registry
from gdn.testing.compare import same_bits
from tests.gpu import calls, cases, chunk, replay_slots, test_gated_delta_rule, test_indexer_steps, test_indexer_topk, test_steps
from tests.gpu.delta_rule import Arguments, backends
from tests.gpu.twins import twin, whole
from tests.gpu.waits import no_waits

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
HELD_BACK = 400_000_000  # cycles, a fifth of a second
ATTEMPTS = 5  # each held back twice as long: other processes may keep this one waiting


# --- calls that need constants: offsets of equal lengths, slots 0 to N - 1, a bias of zeros ------------------------------


def _batch(arguments: Arguments, count: int) -> Arguments:
    rows = {name: x.unflatten(1, (count, -1)).squeeze(0) for name, x in arguments.items() if name in chunk.PER_TOKEN}
    return arguments | rows | {"cu_seqlens": None, "out": None}


def _chunk(device: torch.device) -> Arguments:
    return _batch(chunk.arguments_of(cases.MAIN_CHUNK, device, lengths=[70] * 3, padded_tokens=0), 3)


def _raw_chunk(device: torch.device) -> Arguments:
    arguments = chunk.arguments_of(calls._RAW_CHUNK, device, lengths=[65] * 4, padded_tokens=0)
    return _batch(arguments, 4) | {"dt_bias": None}


def _recurrent(device: torch.device) -> Arguments:
    plain = recurrent_inputs(cases.MAIN_RECURRENT, device, lengths=[2, 2, 2], padded_tokens=0)
    states = plain["initial_state"][plain.pop("ssm_state_indices").long()]
    return _batch(plain, 3) | {"initial_state": states, "inplace_final_state": True}


def _gated_delta_rule(device: torch.device) -> Arguments:
    arguments = test_gated_delta_rule.step([1, 3, 1, 200, 70])
    states = arguments["initial_state"][arguments.pop("state_indices").long()]
    return arguments | {"initial_state": states, "inplace_final_state": True}


def _conv(device: torch.device) -> Arguments:
    arguments = test_steps.prefill(test_steps.Case(lengths=(70,), padding=0), device, dead=())
    return {name: arguments[name] for name in ("x", "weight", "bias")}


def _update(device: torch.device) -> Arguments:
    case = test_steps.Case(lengths=(1,) * 9, padding=0)
    arguments = test_steps.decode(case, device) | {"query_start_loc": None, "out": None}
    arguments["x"] = arguments["x"].unflatten(0, (9, 1)).mT.contiguous()
    return arguments


CALLS: dict[str, tuple[str, str, Callable[[torch.device], Arguments]]] = {
    "chunk": ("chunk_gated_delta_rule", "chunk", _chunk),
    "chunk, raw gates": ("chunk_gated_delta_rule", "chunk", _raw_chunk),
    "recurrent": ("fused_recurrent_gated_delta_rule", "recurrent", _recurrent),
    "both forms": ("gated_delta_rule", "chunk", _gated_delta_rule),
    "conv": ("causal_conv1d_fn", "conv1d", _conv),
    "update": ("causal_conv1d_update", "conv1d_update", _update),
}


# --- operators that `tests.gpu.calls` has no call of ---------------------------------------------------------------------


def _write(device: torch.device) -> Arguments:
    cache = test_indexer_steps.make_cache(9, 20, None, 128, torch.uint8)
    slots = test_indexer_steps.slots_of(37, 9 * 20, 3, torch.int64)
    return {"k": test_indexer_steps.normal(37, 128, seed=1, device=device), "cache": cache, "slot_mapping": slots}


def _gather(device: torch.device) -> Arguments:
    return test_indexer_steps.gather_call([0, 33, 0, 5, 64, 1], None, 128, torch.uint8, 64)


def _compress(device: torch.device) -> Arguments:
    runs = [test_indexer_steps.Run(1, 3, 9), test_indexer_steps.Run(2, 0, 4)]
    return test_indexer_steps.compress_call(runs, 4, 8, None, 128, torch.uint8, torch.bfloat16)


def _expand(device: torch.device) -> Arguments:
    groups = torch.arange(40, dtype=torch.int32, device=device).expand(7, 40).contiguous()
    return {"group_indices": groups, "positions": torch.arange(300, 307, device=device), "ratio": 4}


def _ragged_topk(device: torch.device) -> Arguments:
    q, k, weights, starts, ends, k_scale = test_indexer_topk.ragged(60, 900, "causal")
    return {
        "q": q, "k": k, "weights": weights, "cu_seqlen_ks": starts, "cu_seqlen_ke": ends, "topk": 256, "k_scale": k_scale,
        "workspace_bytes": 25 * 900 * 4,
    }  # fmt: skip


def _paged_topk(device: torch.device) -> Arguments:
    names = ("q", "cache", "weights", "context_lens", "block_tables", "max_context_len", "relu")
    given = calls.CALLS["paged"].make(device)
    return {name: given[name] for name in names} | {"topk": 32}


def _dense_prefill(device: torch.device) -> Arguments:
    arguments = calls._attention([1, 90, 20, 0, 8], 90, dense=True)(device)
    return arguments | {"query_lens_host": (1, 90, 20, 0, 8), "seq_lens_host": (90, 90, 33, 0, 40)}


MORE: dict[str, tuple[str, str, Callable[[torch.device], Arguments]]] = {
    "write": ("write_indexer_cache", "write_indexer_cache", _write),
    "gather": ("gather_indexer_cache", "gather_indexer_cache", _gather),
    "compress": ("compress_indexer_keys", "compress_indexer_keys", _compress),
    "expand": ("expand_topk_groups", "expand_topk_groups", _expand),
    "ragged top-k": ("indexer_topk", "mqa_logits", _ragged_topk),
    "paged top-k": ("paged_indexer_topk", "paged_mqa_logits", _paged_topk),
    "dense prefill, decode too": ("attention", "attention_prefill", _dense_prefill),
    "fold": ("fold_states", "fold_states", replay_slots.Fold().arguments),
    "accepted trees": ("accept_draft_tree", "accept_draft_tree", replay_slots.Trees().arguments),
}
EVERY = [(name, backend) for name, (_, op, _) in CALLS.items() for backend in backends(op)]
OF_CONSTANTS = pytest.mark.parametrize(("name", "backend"), EVERY)


class Call:
    """A call on given arguments; its result is all that it returns and all that it may have written."""

    def __init__(self, function: str, arguments: Arguments, backend: str) -> None:
        self.function, self.arguments, self.backend = getattr(gdn, function), arguments, backend

    def twin(self) -> "Call":
        return Call(self.function.__name__, twin(self.arguments), self.backend)

    def __call__(self) -> list[Tensor]:
        found = self.function(**self.arguments, backend=self.backend)
        results = [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]
        return [*results, *[whole(x) for x in self.arguments.values() if isinstance(x, Tensor)]]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))


def make(name: str, backend: str, device: torch.device) -> Call:
    function, _, maker = CALLS[name]
    return Call(function, maker(device), backend)


def forget() -> None:
    """Drops every constant that is kept."""
    constants._build_offsets.cache_clear()
    constants._build_zeros.cache_clear()


@pytest.fixture(autouse=True)
def nothing_is_left_running(device: torch.device) -> Iterator[None]:
    """Memory that a held back stream has still to read goes back to torch as a test returns, and the next test would write it."""
    yield
    torch.cuda.synchronize(device)


@contextmanager
def held_back(device: torch.device, attempt: int = 0) -> Iterator[torch.cuda.Stream]:
    """A stream whose work does not start for a fifth of a second or more; work inside the context goes to it."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(HELD_BACK << attempt)
        yield stream


def write_over_what_is_free(device: torch.device) -> list[Tensor]:
    """Small tensors on the current stream, full of bytes that no constant has."""
    return [torch.full((size,), 0x7F, dtype=torch.uint8, device=device) for size in (64, 512, 4096) for _ in range(200)]


@OF_CONSTANTS
def test_a_first_call_on_a_busy_stream(name: str, backend: str, device: torch.device) -> None:
    """The second call, on another stream, is right while the stream of the first has not begun."""
    call = make(name, backend, device)
    expected = call.twin()()  # compiles
    for attempt in range(ATTEMPTS):
        first, second = call.twin(), call.twin()
        forget()
        torch.cuda.synchronize()
        with held_back(device, attempt) as busy:
            late = first()
        other = torch.cuda.Stream(device)
        with torch.cuda.stream(other):
            early = second()
            done = torch.cuda.Event()
            done.record()
        done.synchronize()
        was_held_back = not busy.query()
        assert_same(early, expected)
        busy.synchronize()
        assert_same(late, expected)
        if was_held_back:
            return
    pytest.fail("the first stream was never held back for long enough")


@OF_CONSTANTS
def test_a_constant_is_dropped_in_flight(name: str, backend: str, device: torch.device) -> None:
    """Its memory goes to no other stream while the kernel that reads it has not begun."""
    call = make(name, backend, device)
    expected = call.twin()()
    for attempt in range(ATTEMPTS):
        held = call.twin()
        forget()
        torch.cuda.synchronize()
        other = torch.cuda.Stream(device)
        with held_back(device, attempt) as busy:
            found = held()
        forget()
        with torch.cuda.stream(other):
            spoilt = write_over_what_is_free(device)
        other.synchronize()
        was_held_back = not busy.query()
        with torch.cuda.stream(busy):  # the same stream may take the memory: it writes it after the kernel has read it
            spoilt += write_over_what_is_free(device)
        busy.synchronize()
        assert_same(found, expected)
        if was_held_back:
            return
    pytest.fail("the stream was never held back for long enough")


@pytest.mark.parametrize("order", ["capture first", "eager first"])
@OF_CONSTANTS
def test_captured(name: str, backend: str, order: str, device: torch.device) -> None:
    """A graph captured before or after an eager first use replays on another stream than the one that filled constants."""
    call = make(name, backend, device)
    live, start = call.twin(), call.twin()
    expected = call.twin()()
    torch.cuda.synchronize()
    forget()
    if order == "eager first":
        with held_back(device):
            call.twin()()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = live()
    if order == "capture first":
        forget()
        with held_back(device):
            call.twin()()
    other = torch.cuda.Stream(device)
    with torch.cuda.stream(other):
        for _ in range(3):
            for name_, x in start.arguments.items():
                if isinstance(x, Tensor):
                    whole(live.arguments[name_]).copy_(whole(x))
            graph.replay()
    other.synchronize()
    assert_same(captured, expected)


def _alternate(call: Call, rounds: int, device: torch.device) -> None:
    """Runs a call on two streams, none of which waits for the other, and compares every round's results bit for bit."""
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    twins = [call.twin(), call.twin()]
    call.twin()()  # compiles
    torch.cuda.synchronize()
    done = 0
    while done < rounds:
        part = min(50, rounds - done)
        results: list[list[list[Tensor]]] = [[], []]
        for n in range(part):
            for place, (stream, one) in enumerate(zip(streams, twins, strict=True)):
                with torch.cuda.stream(stream):
                    if (done + n) % 25 == place:
                        torch.cuda._sleep(200_000)  # the other one overtakes
                    found = one()
                    results[place].append([x.clone() for x in found] if n == part - 1 else found[:1])
        torch.cuda.synchronize()
        for first, second in zip(*results, strict=True):
            assert_same(first, second)
        done += part


@OF_CONSTANTS
def test_two_streams_of_calls_with_constants(name: str, backend: str, device: torch.device) -> None:
    _alternate(make(name, backend, device), 500, device)


REST = [one for one in calls.every_call() if one[1] != "reference"]
REST += [(name, backend) for name, (_, op, _) in MORE.items() for backend in backends(op)]


@pytest.mark.parametrize(("name", "backend"), REST)
def test_two_streams_of_every_operator(name: str, backend: str, device: torch.device) -> None:
    """1,000 calls on the same shapes, half of them on each stream."""
    if name in MORE:
        function, _, maker = MORE[name]
    else:
        function, maker = calls.CALLS[name].function, calls.CALLS[name].make
    _alternate(Call(function, maker(device), backend), 500, device)


def test_no_operator_is_left_out(device: torch.device) -> None:
    called = {call.op for call in calls.CALLS.values()} | {op for _, op, _ in (*CALLS.values(), *MORE.values())}
    assert called == {one.name for one in registry.OPERATORS.values() if one.modules and one.functions}


def test_a_new_length_never_waits(device: torch.device) -> None:
    """A length that was never seen makes no wait for the device, and a repeated one no event either."""
    call = make("chunk", "cute", device)
    call()
    forget()
    torch.cuda.synchronize()
    arguments = call.arguments
    with no_waits():
        for length in (69, 68, 67, 69, 68):
            cut = {name: x[:, :length] for name, x in arguments.items() if name in chunk.PER_TOKEN and x is not None}
            gdn.chunk_gated_delta_rule(**arguments | cut, backend="cute")
