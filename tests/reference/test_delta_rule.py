"""The reference against the float64 oracle, against the paper's form, and against itself in its other form."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gdn.ops.delta_rule.inputs import CASES, chunk_inputs, chunk_problem, recurrent_inputs, recurrent_problem
from gdn.ops.delta_rule.oracle import DeltaRuleResult, oracle_of
from gdn.testing.compare import error, same_bits, token_error
from tests.reference.calls import copied
from tests.references import reference

F64 = {"dtype": "float64", "state_dtype": "float64", "gate_dtype": "float64", "beta_dtype": "float64"}
LENGTHS = [0, 1, 63, 64, 65, 130]
EXACT = 1e-11  # float64 against float64
SINGLE = 2e-5  # float32 against float64, on inputs without cancellation


def check(o: torch.Tensor, state: torch.Tensor | None, expected: DeltaRuleResult, tolerance: float) -> None:
    found = token_error(o, expected.o, expected.offsets)
    assert found.within(tolerance), found
    if state is not None and expected.state is not None:
        found = error(state, expected.state, groups=2)
        assert found.within(tolerance), found


def check_pool(pool: torch.Tensor, before: torch.Tensor, expected: DeltaRuleResult, tolerance: float) -> None:
    assert expected.state is not None
    written = sorted(expected.written_slots)
    found = error(pool[written], expected.state[written], groups=2)
    assert found.within(tolerance), found
    others = [slot for slot in range(pool.shape[0]) if slot not in expected.written_slots]
    assert same_bits(pool[others], before[others])


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    heads, ratio = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3, 4]))
    is_gqa = draw(st.booleans())
    use_gate = draw(st.booleans())
    return {
        **F64,
        "num_q_heads": heads * ratio if is_gqa else heads,
        "num_k_heads": heads,
        "num_v_heads": heads if is_gqa else heads * ratio,
        "head_k_dim": draw(st.sampled_from([4, 12])),
        "head_v_dim": draw(st.sampled_from([4, 8])),
        "gate_dtype": "float64" if use_gate else draw(st.sampled_from([None, "float64"])),
        "beta_dtype": draw(st.sampled_from([None, "float64"])),
        "state_v_first": draw(st.booleans()),
        "use_qk_l2norm": draw(st.booleans()),
        "use_gate": use_gate,
        "has_initial_state": draw(st.booleans()),
    }


@given(problems(), st.lists(st.integers(0, 70), min_size=1, max_size=3), st.integers(0, 3))
def test_chunk_recurrent_and_oracle_agree(fields: dict[str, Any], lengths: list[int], padded: int) -> None:
    arguments = chunk_inputs(chunk_problem(**fields), seed=len(lengths), lengths=lengths, padded_tokens=padded)
    expected = oracle_of(arguments)
    check(*reference.chunk_gated_delta_rule(**arguments), expected, EXACT)
    del arguments["output_final_state"]
    check(*reference.fused_recurrent_gated_delta_rule(**arguments), expected, EXACT)


@pytest.mark.parametrize("form", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_the_papers_form(form: str) -> None:
    """S_t = a_t S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T with S [V, K], head by head."""
    generator = torch.Generator().manual_seed(3)
    length, heads, k_dim, v_dim = 70, 3, 6, 5
    q, k = (torch.randn(1, length, heads, k_dim, generator=generator, dtype=torch.float64) for _ in range(2))
    k = k / k.norm(dim=-1, keepdim=True)
    v = torch.randn(1, length, heads, v_dim, generator=generator, dtype=torch.float64)
    alpha = torch.rand(1, length, heads, generator=generator, dtype=torch.float64) * 0.5 + 0.5
    beta = torch.rand(1, length, heads, generator=generator, dtype=torch.float64)
    o = torch.zeros(1, length, heads, v_dim, dtype=torch.float64)
    final = torch.zeros(1, heads, v_dim, k_dim, dtype=torch.float64)
    for h in range(heads):
        state = final[0, h]
        for t in range(length):
            kt, vt, b = k[0, t, h], v[0, t, h], beta[0, t, h]
            state = alpha[0, t, h] * state @ (torch.eye(k_dim, dtype=torch.float64) - b * torch.outer(kt, kt))
            state = state + b * torch.outer(vt, kt)
            o[0, t, h] = state @ q[0, t, h] * k_dim**-0.5
        final[0, h] = state
    options = {"output_final_state": True, "state_v_first": True}
    got, state = getattr(reference, form)(q, k, v, alpha.log(), beta, **options)
    assert error(got.transpose(1, 2), o.transpose(1, 2), groups=2).within(EXACT)
    assert error(state, final, groups=2).within(EXACT)


@pytest.mark.parametrize("case", CASES)
def test_hard_inputs(case: str) -> None:
    fields = {**F64, "has_initial_state": True, "use_qk_l2norm": True}
    exact = chunk_inputs(chunk_problem(**fields), lengths=LENGTHS, case=case)  # type: ignore[arg-type]
    check(*reference.chunk_gated_delta_rule(**exact), oracle_of(exact), EXACT)
    single = chunk_inputs(chunk_problem(), lengths=LENGTHS, case=case)  # type: ignore[arg-type]
    check(*reference.chunk_gated_delta_rule(**single), oracle_of(single), SINGLE)


def test_raw_gates_reach_both_ends_of_softplus() -> None:
    for case in ("no_decay", "total_decay", "random"):
        problem = chunk_problem(**F64, use_gate=True, use_beta_sigmoid=True)
        arguments = chunk_inputs(problem, lengths=[65, 3], case=case)  # type: ignore[arg-type]
        check(*reference.chunk_gated_delta_rule(**arguments), oracle_of(arguments), EXACT)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_inputs_lose_only_the_last_rounding(dtype: str) -> None:
    problem = chunk_problem(dtype=dtype, gate_dtype="bfloat16", beta_dtype="float16")
    arguments = chunk_inputs(problem, lengths=LENGTHS, strided=True)
    o, state = reference.chunk_gated_delta_rule(**arguments)
    assert o.dtype == getattr(torch, dtype) and state is not None and state.dtype == torch.float32
    expected = oracle_of(arguments)
    assert token_error(o, expected.o, expected.offsets).within(2**-8)
    assert error(state, expected.state, groups=2).within(SINGLE)  # type: ignore[arg-type]


@pytest.mark.parametrize("null_slot", [-1, 0])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_chunk_pool(null_slot: int, v_first: bool, index_dtype: str) -> None:
    """Null slots, masks, write slots, checkpoints, empty sequences, gaps between slots and NaN in every foreign place."""
    problem = chunk_problem(
        **F64, index_dtype=index_dtype, state_v_first=v_first, has_mask=True, has_final_indices=True, has_checkpoints=True
    )
    arguments = chunk_inputs(
        problem, lengths=[*LENGTHS, 128], strided=True, slot_gap=6, null_slot=null_slot, null_sequences=[3], padded_tokens=5
    )
    arguments["final_state_indices"][2] = null_slot
    before = copied(arguments)["initial_state"]
    expected = oracle_of(arguments)
    o, pool = reference.chunk_gated_delta_rule(**arguments)
    assert pool is arguments["initial_state"]
    assert token_error(o, expected.o, expected.offsets).within(EXACT)
    assert expected.live == [False, True, True, False, True, True, True]
    check_pool(pool, before, expected, EXACT)


def test_checkpoint_is_the_state_of_a_shorter_call() -> None:
    problem = chunk_problem(**F64, index_dtype="int32", has_checkpoints=True)
    arguments = chunk_inputs(problem, lengths=[150])
    arguments["checkpoint_offsets"] = torch.tensor([[64, 128]])
    first = copied(arguments)
    _, pool = reference.chunk_gated_delta_rule(**arguments)
    for column, length in enumerate((64, 128)):
        shorter = copied(first)
        for name in ("q", "k", "v", "g", "beta"):
            shorter[name] = shorter[name][:, :length]
        shorter["cu_seqlens"] = torch.tensor([0, length])
        shorter["checkpoint_offsets"] = torch.zeros(1, 2, dtype=torch.int64)
        _, short_pool = reference.chunk_gated_delta_rule(**shorter)
        slot = int(first["checkpoint_slots"][0, column])
        assert error(pool[slot], short_pool[int(first["state_indices"][0])], groups=1).within(EXACT)


def test_pool_is_updated_without_being_asked_for() -> None:
    arguments = chunk_inputs(chunk_problem(**F64, index_dtype="int32"), lengths=[5, 70])
    arguments["output_final_state"] = False
    before = copied(arguments)["initial_state"]
    expected = oracle_of(arguments)
    _, nothing = reference.chunk_gated_delta_rule(**arguments)
    assert nothing is None
    check_pool(arguments["initial_state"], before, expected, EXACT)


def test_batch_rows_are_sequences() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 66, 2, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    g = -torch.rand(3, 66, 2, generator=generator, dtype=torch.float64)
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "g": g, "use_qk_l2norm_in_kernel": True}
    expected = oracle_of(arguments)
    check(*reference.chunk_gated_delta_rule(**arguments, output_final_state=True), expected, EXACT)
    check(*reference.fused_recurrent_gated_delta_rule(**arguments), expected, EXACT)


@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize("separate_targets", [False, True])
def test_speculative_indices(columns: int, separate_targets: bool) -> None:
    """The state read is that of the accepted token, every token's state is kept, as far as there are columns."""
    problem = recurrent_problem(
        **F64, index_dtype="int64", write_every_token=True, has_accepted=True, has_final_indices=separate_targets
    )
    arguments = recurrent_inputs(
        problem, lengths=[4, 0, 1, 3, 2, 2], num_columns=columns, null_sequences=[3], padded_tokens=2, slot_gap=2, null_slot=0
    )
    arguments["num_accepted_tokens"][4] = columns + 1  # padding
    arguments["num_accepted_tokens"][5] = 1
    target = arguments["final_state_indices" if separate_targets else "ssm_state_indices"]
    target[5, 1] = 0  # a null write: that write alone is skipped
    arguments["initial_state"].nan_to_num_(0.25)
    before = copied(arguments)["initial_state"]
    expected = oracle_of(arguments)
    assert expected.live == [True, False, True, False, False, True]
    o, pool = reference.fused_recurrent_gated_delta_rule(**arguments)
    assert token_error(o, expected.o, expected.offsets).within(EXACT)
    check_pool(pool, before, expected, EXACT)


def test_two_speculative_steps_equal_plain_decoding() -> None:
    """Step one verifies 1 + 3 tokens of which 1 + 2 are accepted; step two starts from the state of the second draft."""
    problem = recurrent_problem(**F64, index_dtype="int32", has_initial_state=True)
    plain = recurrent_inputs(problem, lengths=[5])
    expected = oracle_of({**plain, "ssm_state_indices": None})
    state = plain["initial_state"][plain["ssm_state_indices"].long()]
    pool = torch.full((6, *state.shape[1:]), torch.nan, dtype=torch.float64)
    slots = torch.tensor([[4, 1, 5, 2]], dtype=torch.int32)
    pool[4] = state

    def step(tokens: list[int], accepted: int) -> torch.Tensor:
        picked = {name: plain[name][:, tokens] for name in ("q", "k", "v", "g", "beta")}
        o, _ = reference.fused_recurrent_gated_delta_rule(
            **picked, initial_state=pool, ssm_state_indices=slots, use_qk_l2norm_in_kernel=True,
            num_accepted_tokens=torch.tensor([accepted], dtype=torch.int32), cu_seqlens=torch.tensor([0, len(tokens)]),
        )  # fmt: skip
        return o

    first = step([0, 1, 2, 0], accepted=1)  # the last draft is wrong and is not accepted
    second = step([3, 4], accepted=3)
    plain["initial_state"] = state
    plain["ssm_state_indices"] = None
    expected = oracle_of(plain)
    got = torch.cat([first[:, :3], second], dim=1)
    assert token_error(got, expected.o, expected.offsets).within(EXACT)
    assert error(pool[slots[0, 1]], expected.state[0], groups=1).within(EXACT)  # type: ignore[index]


def test_draft_tree_equals_its_paths() -> None:
    problem = recurrent_problem(**F64, index_dtype="int32", write_every_token=True, has_parent=True)
    arguments = recurrent_inputs(problem, lengths=[2, 6], num_columns=6)
    original = copied(arguments)
    o, pool = reference.fused_recurrent_gated_delta_rule(**arguments)
    paths = {0: [0], 1: [1], 2: [0, 2], 3: [0, 3], 4: [1, 4], 5: [1, 5]}
    for node, path in paths.items():
        rows = [2 + i for i in path]
        picked = {name: original[name][:, rows] for name in ("q", "k", "v", "g", "beta")}
        slot = int(original["ssm_state_indices"][1, 0])
        path_o, path_state = reference.fused_recurrent_gated_delta_rule(
            **picked, initial_state=original["initial_state"][slot : slot + 1], use_qk_l2norm_in_kernel=True
        )
        assert error(o[:, 2 + node], path_o[:, -1], groups=2).within(EXACT)
        assert error(pool[original["ssm_state_indices"][1, node].long()], path_state[0], groups=1).within(EXACT)  # type: ignore[index]


@pytest.mark.parametrize("shape", [(3 * 5,), (3, 5)])
def test_draft_trees_of_batch_rows(shape: tuple[int, ...]) -> None:
    """Sequence b without cu_seqlens is row b: its parents are rows b * T .. b * T + T - 1 of parent_token."""
    problem = recurrent_problem(**F64, index_dtype="int32", write_every_token=True, has_parent=True)
    packed = recurrent_inputs(problem, lengths=[5, 5, 5], num_columns=5)
    packed["parent_token"] = torch.tensor([[-1, 0, 1, 1, 3], [-1, -1, 0, 0, -1], [-1, 0, 0, 2, 1]], dtype=torch.int32).flatten()
    expected = oracle_of(packed)
    batched = copied(packed) | {"cu_seqlens": None, "parent_token": packed["parent_token"].view(shape)}
    for name in ("q", "k", "v", "g", "beta"):
        batched[name] = packed[name].unflatten(1, (3, 5))[0]
    before = copied(packed)["initial_state"]
    o, pool = reference.fused_recurrent_gated_delta_rule(**batched)
    assert pool is not None
    assert token_error(o, expected.o, expected.offsets).within(EXACT)
    check_pool(pool, before, expected, EXACT)


def test_where_final_states_go() -> None:
    arguments = recurrent_inputs(recurrent_problem(**F64), lengths=[2, 0, 1])
    run = reference.fused_recurrent_gated_delta_rule
    before = arguments["initial_state"].clone()
    expected = oracle_of(arguments).state
    assert expected is not None
    _, new = run(**arguments)
    assert new is not None and new.data_ptr() != arguments["initial_state"].data_ptr()
    assert same_bits(arguments["initial_state"], before)
    assert error(new, expected, groups=2).within(EXACT)  # the empty sequence passes its state on
    assert run(**{**arguments, "output_final_state": False})[1] is None
    assert run(**arguments, disable_state_update=True)[1] is None
    _, same = run(**arguments, inplace_final_state=True)
    assert same is arguments["initial_state"]
    assert error(same, expected, groups=2).within(EXACT)


def test_disabled_state_update_leaves_the_pool() -> None:
    problem = recurrent_problem(**F64, index_dtype="int32", write_every_token=True, has_final_state=False)
    arguments = recurrent_inputs(problem, lengths=[3, 2])
    before = copied(arguments)["initial_state"]
    expected = oracle_of(arguments)
    o, pool = reference.fused_recurrent_gated_delta_rule(**arguments)
    assert token_error(o, expected.o, expected.offsets).within(EXACT)
    assert pool is arguments["initial_state"] and same_bits(pool, before)


def test_prefill_in_two_calls_then_decode_equals_one_prefill() -> None:
    problem = chunk_problem(**F64, index_dtype="int32")
    whole = chunk_inputs(problem, lengths=[150])
    parts = copied(whole)
    expected = oracle_of(whole)
    pieces = []
    for start, end in ((0, 100), (100, 149), (149, 150)):
        piece = {name: parts[name][:, start:end] for name in ("q", "k", "v", "g", "beta")}
        options = {"initial_state": parts["initial_state"], "use_qk_l2norm_in_kernel": True}
        if end - start == 1:
            o, _ = reference.fused_recurrent_gated_delta_rule(**piece, **options, ssm_state_indices=parts["state_indices"])
        else:
            o, _ = reference.chunk_gated_delta_rule(**piece, **options, state_indices=parts["state_indices"])
        pieces.append(o)
    assert token_error(torch.cat(pieces, dim=1), expected.o, expected.offsets).within(EXACT)


def test_bfloat16_pool_rounds_only_what_it_stores() -> None:
    problem = recurrent_problem(state_dtype="bfloat16", index_dtype="int32", write_every_token=True)
    arguments = recurrent_inputs(problem, lengths=[4])
    expected = oracle_of(arguments)
    o, pool = reference.fused_recurrent_gated_delta_rule(**arguments)
    assert token_error(o, expected.o, expected.offsets).within(SINGLE)
    for i in range(4):
        slot = int(arguments["ssm_state_indices"][0, i])
        exact = expected.state[slot]  # type: ignore[index]
        assert torch.allclose(pool[slot].double(), exact, rtol=2**-8, atol=1e-6)
