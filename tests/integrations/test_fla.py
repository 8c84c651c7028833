"""The FLA adapter: signatures, values, refusals, and the backend as FLA's dispatcher asks it."""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gdn.integrations import Handle, Refused, _hosts, _signatures, fla
from gdn.integrations._calls import asking
from gdn.ops.delta_rule.oracle import oracle_delta_rule
from tests.integrations import stand_in

RULE = "fla.ops.gated_delta_rule"
OFFERED = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "causal_conv1d", "rms_norm_gated"]
NAMES = {name.rpartition(".")[2]: name for name in _hosts.FLA.functions}


@pytest.mark.parametrize("name", OFFERED)
def test_signatures_are_the_recorded_ones(name: str) -> None:
    recorded = stand_in.parameters("fla", NAMES[name])
    assert _signatures.difference(recorded, _signatures.of_object(getattr(fla, name))) is None


def rule_inputs(tokens: int = 70, batch: int = 2, dtype: torch.dtype = torch.float32, v_dim: int = 16) -> dict[str, Any]:
    torch.manual_seed(0)
    q, k = torch.randn(2, batch, tokens, 2, 16, dtype=dtype).unbind()
    v, state = torch.randn(batch, tokens, 4, v_dim, dtype=dtype), torch.randn(batch, 4, 16, v_dim)
    g, beta = -torch.rand(batch, tokens, 4), torch.rand(batch, tokens, 4)
    return {"q": q, "k": torch.nn.functional.normalize(k, dim=-1), "v": v, "g": g, "beta": beta, "initial_state": state}


def check(got: tuple[torch.Tensor, torch.Tensor | None], **arguments: Any) -> None:
    expected = oracle_delta_rule(**arguments)
    torch.testing.assert_close(got[0].double(), expected.o.view(got[0].shape), rtol=1e-5, atol=1e-5)
    if arguments.get("output_final_state", True):
        assert got[1] is not None and expected.state is not None
        torch.testing.assert_close(got[1].double(), expected.state, rtol=1e-5, atol=1e-5)
    else:
        assert got[1] is None


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_the_rule_by_position_and_by_keyword(name: str) -> None:
    function, given = getattr(fla, name), rule_inputs()
    is_chunk = name.startswith("chunk")
    leading = [given[one] for one in ("q", "k", "v", "g")] + ([] if is_chunk else [None, None]) + [given["beta"]]
    by_position = function(*leading, 0.3, given["initial_state"], True, True)
    check(by_position, **given, scale=0.3, use_qk_l2norm_in_kernel=True)
    check(function(**given), **given, output_final_state=False)
    v_first = {**given, "initial_state": given["initial_state"].transpose(-1, -2).contiguous()}
    for flag in ("state_v_first", "transpose_state_layout"):
        check(function(**v_first, output_final_state=True, **{flag: True}), **v_first, state_v_first=True)
    packed = {one: x[:1] for one, x in given.items()} | {"cu_seqlens": torch.tensor([0, 30, 70])}
    packed["initial_state"] = given["initial_state"]
    check(function(**packed, output_final_state=True), **packed)


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_raw_gates_and_negative_eigenvalues(name: str) -> None:
    function, given = getattr(fla, name), rule_inputs()
    given |= {"g": torch.randn_like(given["g"]), "beta": torch.randn_like(given["beta"])}
    raw = {"use_gate_in_kernel": True, "A_log": torch.randn(4), "dt_bias": torch.randn(4), "use_beta_sigmoid_in_kernel": True}
    check(function(**given, **raw, output_final_state=True), **given, **raw)
    doubled = {**given, **raw, "beta": 2 * given["beta"].double().sigmoid(), "use_beta_sigmoid_in_kernel": False}
    check(function(**given, **raw, output_final_state=True, allow_neg_eigval=True), **doubled)
    plain = {**given, "g": -given["g"].abs(), "beta": given["beta"].sigmoid()}
    check(function(**plain, A_log=torch.randn(4), output_final_state=True), **plain), "A_log without the raw gate has no effect"


def test_recurrent_without_gates_and_with_other_value_dims() -> None:
    given = rule_inputs(5, v_dim=32)
    check(fla.fused_recurrent_gated_delta_rule(**given, output_final_state=True), **given)
    bare = {one: given[one] for one in ("q", "k", "v")}
    check(fla.fused_recurrent_gated_delta_rule(**bare, output_final_state=True), **bare)


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_flags_that_are_none(name: str) -> None:
    """Models hand on flags of theirs, such as `use_cache`: None counts as False, as in FLA."""
    given, flags = rule_inputs(), ("output_final_state", "use_beta_sigmoid_in_kernel", "use_gate_in_kernel")
    more = dict.fromkeys(("use_qk_l2norm_in_kernel", "state_v_first", *flags))
    o, state = getattr(fla, name)(**given, **more)
    assert state is None and torch.equal(o, getattr(fla, name)(**given)[0])


@pytest.mark.parametrize("gate", ["g", "beta"])
def test_gates_without_a_kernel(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gdn.integrations._calls._is_sm90", lambda index: True)
    with torch._subclasses.FakeTensorMode():
        q = torch.empty(1, 4, 2, 64, dtype=torch.bfloat16, device="cuda")
        given = {one: torch.empty(1, 4, 2, device="cuda") for one in ("g", "beta")}
        rules = ((fla._refuse_chunk, fla.chunk_gated_delta_rule), (fla._refuse_recurrent, fla.fused_recurrent_gated_delta_rule))
        for refusal, function in rules:
            ask = asking(refusal, inspect.unwrap(function))
            assert ask(q, q, q, **given) is None
            assert ask(q, q, q, **given | {gate: given[gate].double()}) == "g or beta is float64, which has no kernel"


def test_ignored_arguments_change_nothing() -> None:
    given = rule_inputs()
    given |= {one: given[one][:1] for one in ("q", "k", "v", "g", "beta")} | {"cu_seqlens": torch.tensor([0, 30, 70])}
    more = {"cu_seqlens_cpu": torch.tensor([0]), "chunk_indices": torch.tensor([[7, 7]]), "chunk_size": 64}
    assert torch.equal(fla.chunk_gated_delta_rule(**given)[0], fla.chunk_gated_delta_rule(**given, **more)[0])


def test_offsets_on_the_host_say_how_long_the_longest_sequence_is() -> None:
    given = rule_inputs()
    given |= {one: given[one][:1] for one in ("q", "k", "v", "g", "beta")} | {"cu_seqlens": torch.tensor([0, 30, 70])}
    on_host = fla.chunk_gated_delta_rule(**given, cu_seqlens_cpu=given["cu_seqlens"].clone())
    assert torch.equal(fla.chunk_gated_delta_rule(**given)[0], on_host[0])
    with pytest.raises(ValueError, match="max_seqlen: expected at least the 40 tokens of the longest sequence, got 39"):
        fla.chunk_gated_delta_rule(**given, cu_seqlens_cpu=torch.tensor([0, 31, 70]))


def test_offsets_on_the_host_do_not_part_a_compiled_function() -> None:
    given = rule_inputs()
    given |= {one: given[one][:1] for one in ("q", "k", "v", "g", "beta")} | {"cu_seqlens": torch.tensor([0, 30, 70])}
    compiled = torch.compile(fla.chunk_gated_delta_rule, backend="eager", fullgraph=True)
    found = compiled(**given, cu_seqlens_cpu=given["cu_seqlens"].clone())
    assert torch.equal(fla.chunk_gated_delta_rule(**given)[0], found[0])


RULE_REFUSALS = {
    "the tokens are on meta": {"q": torch.empty(2, 70, 2, 16, device="meta")},
    "autograd needs gradients": {"beta": torch.rand(2, 70, 4, requires_grad=True)},
    "q, k and v differ in dtype": {"v": torch.zeros(2, 70, 4, 16, dtype=torch.bfloat16)},
    "beta is not": {"beta": torch.zeros(2, 70, 4, 16)},
    "allow_neg_eigval without": {"allow_neg_eigval": True},
    "the states are float16": {"initial_state": torch.zeros(2, 4, 16, 16, dtype=torch.float16)},
    "both state_v_first and its old name": {"state_v_first": True, "transpose_state_layout": True},
    "keyword head_first": {"head_first": False},
    "3 value heads are no multiple of 2 key heads": {"v": torch.zeros(2, 70, 3, 16)},
}
CHUNK_REFUSALS = {
    **RULE_REFUSALS,
    "context parallelism": {"cp_context": object()},
    "chunk_size is not 64": {"chunk_size": 32},
    "key and value head dims differ": {"v": torch.zeros(2, 70, 4, 32)},
    "head dim 260 has no kernel": {one: torch.zeros(2, 70, 4, 260) for one in "qkv"},
    "head dim 18 has no kernel": {one: torch.zeros(2, 70, 4, 18) for one in "qkv"},
}
RECURRENT_REFUSALS = {
    **RULE_REFUSALS,
    "gates by key or value channel": {"gv": torch.zeros(2, 70, 4, 16)},
    "use_gate_in_kernel without g and A_log": {"use_gate_in_kernel": True},
    "head dim 260 has no kernel": {"v": torch.zeros(2, 70, 4, 260)},
}


@pytest.mark.parametrize("lengths", [[5, 0, 2, 9], [3], [4, 4]])
@pytest.mark.parametrize("has_state", [True, False])
def test_convolution(lengths: list[int], has_state: bool) -> None:
    torch.manual_seed(1)
    total, width = sum(lengths), 4
    x, weight, bias = torch.randn(1, total, 8), torch.randn(8, width), torch.randn(8)
    state = torch.randn(len(lengths), 8, width) if has_state else None
    before = None if state is None else state.clone()
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    packed = {"cu_seqlens": offsets} if len(set(lengths)) > 1 else {}
    inputs = x if packed else x.view(len(lengths), -1, 8)
    y, final = fla.causal_conv1d(inputs, weight, bias, None, state, True, "silu", **packed)
    assert y.shape == inputs.shape and final is not None
    for n, (start, end) in enumerate(zip(offsets.tolist(), offsets[1:].tolist(), strict=False)):
        old = torch.zeros(8, width) if before is None else before[n]
        whole = torch.cat([old, x[0, start:end].T], dim=1)
        sums = [(whole[:, t + 1 : t + 1 + width] * weight).sum(1) + bias for t in range(end - start)]
        if sums:
            torch.testing.assert_close(y.view(-1, 8)[start:end], torch.nn.functional.silu(torch.stack(sums)))
        assert torch.equal(final[n], whole[:, -width:])
    assert state is None or torch.equal(state, before)
    assert torch.equal(fla.causal_conv1d(inputs, weight, bias, None, state, False, "silu", **packed)[0], y)
    assert fla.causal_conv1d(inputs, weight, bias, None, state, False, "silu", **packed)[1] is None


def test_norm() -> None:
    x, g, weight = torch.randn(3, 4, 16), torch.randn(3, 4, 16), torch.randn(16)
    normed = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-3) * weight
    for activation, act in (("swish", torch.nn.functional.silu), ("sigmoid", torch.sigmoid)):
        torch.testing.assert_close(fla.rms_norm_gated(x, g, weight, None, activation, None, False, True, 1e-3), normed * act(g))


# Function -> arguments of a call that is served, and reasons with what differs.
REFUSALS: dict[str, tuple[Callable[[], dict[str, Any]], list[tuple[str, dict[str, Any]]]]] = {
    "chunk_gated_delta_rule": (rule_inputs, list(CHUNK_REFUSALS.items())),
    "fused_recurrent_gated_delta_rule": (rule_inputs, list(RECURRENT_REFUSALS.items())),
    "causal_conv1d": (lambda: {"x": torch.zeros(1, 3, 8), "weight": torch.zeros(8, 4)}, [
        ("weight is None", {"weight": None}),
        ("a residual", {"residual": torch.zeros(1, 3, 8)}),
        ("context parallelism", {"cp_context": object()}),
        ("keyword seq_idx", {"seq_idx": torch.zeros(3)}),
        ("the tokens are on meta", {"x": torch.empty(1, 3, 8, device="meta")}),
    ]),
    "rms_norm_gated": (lambda: {**{one: torch.zeros(3, 16) for one in "xg"}, "weight": torch.zeros(16), "bias": None}, [
        ("weight is None", {"weight": None}),
        ("a bias", {"bias": torch.zeros(16)}),
        ("a residual", {"residual": torch.zeros(3, 16)}),
        ("a residual", {"prenorm": True}),
        ("the tokens are on meta", {"x": torch.empty(3, 16, device="meta")}),
    ]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "reason", "changes"), [(name, *one) for name, (_, reasons) in REFUSALS.items() for one in reasons]
)
def test_refused_calls(name: str, reason: str, changes: dict[str, Any]) -> None:
    with pytest.raises(Refused, match=f"^{name}: {reason}"):
        getattr(fla, name)(**REFUSALS[name][0]() | changes)


def stand_in_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLA's packages with its dispatcher's rules: asked on every call, lower priority first, an error of a verifier is a no."""
    stand_in.install(
        monkeypatch, _hosts.FLA, f"{RULE}.fused_recurrent_gated_delta_rule={NAMES['fused_recurrent_gated_delta_rule']}"
    )
    backends, chunk_module = sys.modules["fla.backends"], sys.modules[f"{RULE}.chunk"]
    original, registered = chunk_module.chunk_gated_delta_rule, {}

    class BaseBackend:
        backend_type, package_name, priority = "base", None, 5

        @classmethod
        def is_available(cls) -> bool:
            return True

        def is_enabled(self) -> bool:
            return True

        def verify(self, function_name, *args, **kwargs):  # type: ignore[no-untyped-def]
            try:
                return getattr(self, f"{function_name}_verifier")(*args, **kwargs)
            except Exception as error:
                return False, str(error)

    def register(entry_point, *, backend=None, verifier=None, env_var=None):  # type: ignore[no-untyped-def]
        def decorate(made):  # type: ignore[no-untyped-def]
            registered[made.backend_type] = made()
            return made

        assert entry_point == "gated_delta_rule"
        return decorate

    @functools.wraps(original)
    def dispatched(*args: Any, **kwargs: Any) -> Any:
        for one in sorted(registered.values(), key=lambda one: one.priority):
            if one.is_available() and one.is_enabled() and one.verify("chunk_gated_delta_rule", *args, **kwargs)[0]:
                return one.chunk_gated_delta_rule(*args, **kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(backends, "BaseBackend", BaseBackend, raising=False)
    monkeypatch.setattr(backends, "register", register)
    monkeypatch.setattr(chunk_module, "chunk_gated_delta_rule", dispatched)
    monkeypatch.setattr(sys.modules[RULE], "chunk_gated_delta_rule", dispatched, raising=False)


@pytest.fixture(params=["stand-in", "installed"])
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    if request.param == "installed":
        yield pytest.importorskip(RULE)
    else:
        stand_in_fla(monkeypatch)
        yield sys.modules[RULE]


def counts(handle: Handle) -> list[tuple[bool, int, dict[str, int]]]:
    return [(one.replaced, one.served, dict(one.left)) for one in handle.report().points]


def ours(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Makes the operators of `gdn` tell that they were called."""
    import gdn

    told: list[str] = []
    function = getattr(gdn, name)
    monkeypatch.setattr(gdn, name, lambda *args, **kwargs: (told.append(name), function(*args, **kwargs))[1])
    return told


def test_the_dispatcher_reaches_us_until_disabled(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told, given = ours(monkeypatch, "chunk_gated_delta_rule"), rule_inputs()
    with fla.enable(strict=True, allow_reference=True) as handle:
        assert fla.enable(strict=True, allow_reference=True) is handle
        check(host.chunk_gated_delta_rule(**given, output_final_state=True), **given)
        leading = [given[one] for one in ("q", "k", "v", "g", "beta")]
        check(host.chunk_gated_delta_rule(*leading, None, given["initial_state"]), **given, output_final_state=False)
        assert len(told) == 2 and counts(handle) == [(True, 2, {})]
    with fla.enable(allow_reference=True) as again:
        host.chunk_gated_delta_rule(**given)
        assert counts(again) == [(True, 1, {})] and counts(handle) == [(False, 2, {})]


def test_refused_calls_go_on_with_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_fla(monkeypatch)
    host: Any = sys.modules[RULE]
    with fla.enable(allow_reference=True) as handle:
        left, name, arguments = host.chunk_gated_delta_rule(**rule_inputs(), chunk_size=32)
        assert (left, name, arguments["kwargs"]) == (stand_in.HOST, "chunk_gated_delta_rule", {"chunk_size": 32})
        assert counts(handle) == [(True, 0, {"chunk_size is not 64": 1})]
    assert host.chunk_gated_delta_rule(**rule_inputs())[0] == stand_in.HOST
    assert counts(handle) == [(False, 0, {"chunk_size is not 64": 1})], "a disabled backend is not even asked"


def test_recurrent_is_patched_where_asked(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told, given, original = (
        ours(monkeypatch, "fused_recurrent_gated_delta_rule"),
        rule_inputs(3),
        host.fused_recurrent_gated_delta_rule,
    )
    with fla.enable(allow_reference=True):
        assert host.fused_recurrent_gated_delta_rule is original
        with pytest.raises(ValueError, match="expected the options of the enabled handle"):
            fla.enable(allow_reference=True, patch_recurrent=True)
    with fla.enable(patch_recurrent=True, strict=True, allow_reference=True) as handle:
        check(host.fused_recurrent_gated_delta_rule(**given, output_final_state=True), **given)
        assert told == ["fused_recurrent_gated_delta_rule"] and counts(handle)[1] == (True, 1, {})
    assert host.fused_recurrent_gated_delta_rule is original


def test_dispatch_that_is_switched_off_is_reported(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fla.backends"], "_DISPATCH_DISABLED", True, raising=False)
    with fla.enable(allow_reference=True) as handle:
        (report,) = handle.report().points
        assert (report.replaced, report.why) == (False, "FLA_DISABLE_BACKEND_DISPATCH=1: FLA dispatches to no backend")
    with pytest.raises(RuntimeError, match="strict: .*FLA_DISABLE_BACKEND_DISPATCH"):
        fla.enable(strict=True, allow_reference=True)
