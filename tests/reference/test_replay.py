"""Replay decode on the reference against the token recurrence in float64, and what it may touch."""

from dataclasses import replace

import pytest
import torch

import gdn
from gdn.ops.delta_rule.tokens import stochastic_bfloat16
from gdn.testing.compare import same_bits
from tests.replay_walk import CASES, Sequence, Shape, Walk, error_of, state_error, worst_head

Tensor = torch.Tensor
F64 = torch.float64
KINDS = ("token", "line", "tree")
# Heads of q, k, v in the proportions of the models, GQA last; K, V.
HEADS = ((1, 1, 2), (1, 1, 4), (2, 2, 6), (2, 2, 2), (4, 2, 2))
DIMS = ((8, 8), (12, 20), (20, 12))


def run(walk: Walk, sequences: list[Sequence], kind: str, steps: int) -> None:
    """Calls of one kind; most sequences have tokens in each."""
    for _ in range(steps):
        lengths = [1] * len(sequences) if kind == "token" else walk.draw_lengths(len(sequences))
        walk.decode(sequences, lengths, parents=walk.draw_trees(lengths) if kind == "tree" else None)


def started(walk: Walk, count: int, case: str | None = None) -> list[Sequence]:
    return [walk.start(slot, case or CASES[slot % len(CASES)], prompt=1 + 2 * slot) for slot in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", HEADS)
def test_equals_the_recurrence_in_float64(heads: tuple[int, int, int], kind: str) -> None:
    k_dim, v_dim = DIMS[HEADS.index(heads) % len(DIMS)]
    most = 1 if kind == "token" else 4
    for v_first in (False, True):
        walk = Walk(Shape(heads, k_dim, v_dim, F64, most=most, fold_phase=3, state_v_first=v_first))
        sequences = started(walk, 3)
        run(walk, sequences, kind, 8)
        walk.fold(sequences)
        for one in sequences:
            assert error_of(one) < 1e-12 and state_error(walk, one) < 1e-12
            assert int(walk.state_tokens[one.slot]) == one.tokens


@pytest.mark.parametrize("fold_every", [1, 2, 15])
def test_every_phase_and_place_of_the_ring(fold_every: int) -> None:
    """Two turns of the ring at each start: 0 to fold_every - 1 + Tmax live entries, wraps at every row."""
    for phase in sorted({0, min(1, fold_every - 1), fold_every - 1}):
        for most, spare in ((1, 0), (3, 2)):
            shape = Shape((1, 1, 1), 4, 4, F64, most=most, fold_every=fold_every, fold_phase=phase, spare_rows=spare)
            walk = Walk(shape)
            one = walk.start(0, "layer", prompt=1 + phase)
            run(walk, [one], "token" if most == 1 else "line", 2 * shape.rows // most + 2)
            assert error_of(one) < 1e-12


def test_more_accepted_tokens_than_a_fold_covers() -> None:
    walk = Walk(Shape((1, 1, 2), 4, 4, F64, most=8, fold_every=3))
    one = walk.start(1)
    seen = set()
    for _ in range(12):
        walk.decode([one], [8])
        seen.add(one.accepted)
    assert max(seen) > 3 and error_of(one) < 1e-12


@pytest.mark.parametrize("first", [2**24 - 3, 2**31 - 60])
def test_far_positions(first: int) -> None:
    walk = Walk(Shape((1, 1, 2), 4, 4, F64, most=3, fold_every=7, fold_phase=5))
    one = walk.start(2)
    one.tokens = first
    walk.state_tokens[2] = first
    run(walk, [one], "line", 12)
    walk.fold([one])
    assert error_of(one) < 1e-12 and state_error(walk, one) < 1e-12


def long_run(
    kind: str, tokens: int, cases: tuple[str, ...], pool_dtype: torch.dtype | None = None
) -> dict[str, tuple[float, float]]:
    """Case -> errors of o and of the state after the last token, in float32. Explicit folds and forks now and then."""
    most = {"token": 1, "line": 4, "tree": 6}[kind]
    fold_every = 15 if most == 1 else 3 * most
    walk = Walk(Shape(most=most, fold_every=fold_every, fold_phase=4, slots=9, pool_dtype=pool_dtype), seed=1)
    sequences = [walk.start(slot, case) for slot, case in enumerate(cases)]
    count = len(cases)
    steps = tokens if most == 1 else 2 * tokens // most
    for _ in range(steps):
        run(walk, sequences, kind, 1)
        if walk.draw(40) == 0:
            walk.fold([sequences[walk.draw(count)]])
        if walk.draw(40) == 0:  # goes on in another slot, and comes back with the next fork
            n = walk.draw(count)
            free = next(slot for slot in range(9) if slot not in [one.slot for one in sequences])
            outputs = sequences[n].outputs
            sequences[n] = walk.fork(sequences[n], free)
            sequences[n].outputs = outputs
    walk.fold(sequences)
    return {one.case: (error_of(one), state_error(walk, one)) for one in sequences}


# Of float32 pools; a state that decays slowly is rounded once in fold_every tokens.
BOUNDS = {"slow": (4e-6, 1.2e-5)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "cases"), [(300, ("slow", "cut")), pytest.param(5000, CASES, marks=pytest.mark.cover)])
def test_many_tokens_in_float32(tokens: int, cases: tuple[str, ...], kind: str) -> None:
    for case, (of_o, of_state) in long_run(kind, tokens, cases).items():
        most_o, most_state = BOUNDS.get(case, (2e-6, 2e-6))
        assert of_o < most_o and of_state < most_state, (case, of_o, of_state)


def test_errors_of_a_bfloat16_pool() -> None:
    """A write a token loses two to eighteen times as much over 5000 tokens."""
    found = long_run("token", 120, ("layer", "slow"), torch.bfloat16)
    for case, most in {"layer": 2e-3, "slow": 2e-2}.items():
        assert found[case][0] < most, (case, found[case])


# ------------------------------------------------------------------------------------------------------------ what is written


def bits_of(walk: Walk) -> list[Tensor]:
    return [x.clone() for x in (walk.pool, walk.ring, walk.state_tokens)]


@pytest.mark.parametrize("is_updated", [True, False])
def test_only_appended_rows_and_folded_states_change(is_updated: bool) -> None:
    """Slots and rows that are not live hold NaN, the pool and the ring are parts of one buffer, and rows are padded."""
    shape = Shape((2, 2, 2), 6, 5, most=2, fold_every=4, slots=5, ring_slots=4)  # entries of 36, rows of 36 numbers
    walk = Walk(shape, disable_state_update=not is_updated)
    states, entries = 2 * 6 * 5 + 4, shape.rows * 36 + 4
    pages = torch.full((5, states + entries), torch.nan)
    walk.pool = pages[:, :60].view(5, 2, 5, 6)
    walk.ring = pages[:4, states : states + shape.rows * 36].view(4, shape.rows, 36)
    sequences = [walk.start(1), walk.start(3)]
    for _ in range(4):
        before, places = pages.clone(), [(one.slot, one.tokens, one.accepted) for one in sequences]
        counts, lengths = walk.state_tokens.clone(), walk.draw_lengths(2)
        o = walk.decode(sequences, lengths, padded=3)
        if not is_updated:
            for one, (_, tokens, accepted) in zip(sequences, places, strict=True):
                one.tokens, one.accepted = tokens, accepted
        assert same_bits(o[:, sum(lengths) :], torch.zeros_like(o[:, sum(lengths) :]))
        mask = torch.zeros(pages.shape, dtype=torch.bool)
        for (slot, p, a), length in zip(places, lengths, strict=True):
            if not length or not is_updated:
                continue
            for row in range(p, p + length):
                first = states + row % shape.rows * 36
                mask[slot, first : first + 2 * 6 + 2 * 6] = True
            folds = (p + 0) // 4 * 4 > max(int(counts[slot]), (p - a) // 4 * 4)
            mask[slot, :60] |= folds
        assert same_bits(pages.masked_fill(mask, 0), before.masked_fill(mask, 0))
        assert same_bits(walk.state_tokens, counts)
        assert not is_updated or not bool(pages[mask].isnan().any())


def test_padding_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is an error on the CPU is padding on a GPU: the reference, called past the checks, skips it."""
    from tests.references import reference

    walk = Walk(Shape((1, 1, 2), 4, 4, most=2, fold_every=3, slots=6, ring_slots=4))
    one = walk.start(1)
    rows = walk.rows_of(["layer"] * 7, [1, 1, 1, 1, 1, 4, 1])
    walk.state_tokens[3] = 10
    before, counts = bits_of(walk), [one.tokens, -7, 9, 5, 20, 20, 20]
    o, _ = reference.fused_recurrent_gated_delta_rule(
        **rows, initial_state=walk.pool, cu_seqlens=torch.tensor([0, 1, 2, 3, 4, 5, 9, 10]), use_qk_l2norm_in_kernel=True,
        ssm_state_indices=torch.tensor([-1, -3, 3, 5, 1, 1, 1]),  # null, null, fewer tokens than its state, no ring, the rest
        num_accepted_tokens=torch.tensor([1, 5, 1, 1, 3, 1, 0]), disable_state_update=True, **walk.replay(counts),
    )  # fmt: skip
    assert bool((o == 0).all()) and all(same_bits(x, y) for x, y in zip(before, bits_of(walk), strict=True))


def test_a_fold_rounds_once_and_with_the_noise_of_its_slot() -> None:
    shape = Shape((1, 1, 1), 8, 8, pool_dtype=torch.bfloat16, fold_every=3, slots=3)
    for seed in (None, 2**40 + 5):
        options = {} if seed is None else {"rounding_seed": torch.tensor([seed])}
        walk = Walk(shape, **options)
        one = walk.start(1, "kept", prompt=3)  # positions 3, 4, 5 are rows 3, 0, 1; the call at 6 folds them
        for _ in range(3):
            walk.decode([one])
        start, ring = walk.pool[1].clone(), walk.ring[1].clone()
        walk.decode([one])
        k, u, g = (ring[[3, 0, 1], a:b] for a, b in ((0, 8), (8, 16), (16, 17)))
        tails = torch.stack([g[2] + g[1], g[2], g[2] * 0])
        exact = (g[2] + g[1] + g[0]).exp() * start.mT.float() + (tails.exp() * k).mT @ u
        want = exact.bfloat16() if seed is None else stochastic_bfloat16(exact, seed, 1)
        assert same_bits(walk.pool[1], want.mT)


def test_stochastic_folds_are_right_on_average() -> None:
    shape, total = Shape((1, 1, 1), 4, 4, pool_dtype=torch.bfloat16, fold_every=2, slots=2), torch.zeros(1, 4, 4)
    walk = Walk(shape)
    one = walk.start(0, prompt=2)
    walk.decode([one])
    one.outputs.clear()
    pool, ring = walk.pool.clone(), walk.ring.clone()
    exact = Walk(replace(shape, pool_dtype=torch.float32))
    for walked in (walk, exact):
        walked.state_tokens[0] = 2
    exact.pool[:], exact.ring[:] = pool.float(), ring
    exact.fold([one])
    count = 256
    for seed in range(count):
        walk.pool[:], walk.ring[:], walk.options = pool, ring, {"rounding_seed": torch.tensor([seed])}
        walk.state_tokens[0] = 2
        walk.fold([one])
        total += walk.pool[0].float()
    step = exact.pool[0].abs() * 2**-8  # of one rounding; the mean of many is nearer by their root
    assert bool(((total / count - exact.pool[0]).abs() < 4 * step / count**0.5).all())


# ------------------------------------------------------------------------------------------------------------ gates and trees


def test_total_decay_forgets_all_that_was_before() -> None:
    """g = -inf at a token: every later result has the same bits whatever (finite) was before."""
    results = []
    for seed in (0, 1):
        walk = Walk(Shape((1, 1, 2), 4, 4, fold_every=3), seed=seed)
        one = walk.start(0, prompt=5)
        walk.generator.manual_seed(7)
        found = []
        for step in range(9):
            rows = walk.rows_of(["layer"], [1])
            if step == 2:
                rows["g"] = torch.full_like(rows["g"], -torch.inf)
            o, _ = gdn.fused_recurrent_gated_delta_rule(
                **rows, initial_state=walk.pool, ssm_state_indices=walk.ints([0]), **walk.replay([one.tokens + step])
            )
            found += [o] if step >= 2 else []
        results.append((torch.stack(found), walk.pool[0].clone()))
    assert same_bits(results[0][0], results[1][0]) and same_bits(results[0][1], results[1][1])


def test_a_fold_of_nothing_keeps_a_state() -> None:
    """beta = 0 and g = 0."""
    walk = Walk(Shape((1, 1, 2), 4, 4, pool_dtype=torch.bfloat16, fold_every=2))
    one = walk.start(3)
    before = walk.pool[3].clone()
    for step in range(5):
        rows = walk.rows_of(["layer"], [1])
        rows |= {"g": torch.zeros_like(rows["g"]), "beta": torch.zeros_like(rows["beta"])}
        gdn.fused_recurrent_gated_delta_rule(
            **rows, initial_state=walk.pool, ssm_state_indices=walk.ints([3]), **walk.replay([one.tokens + step])
        )
    assert torch.equal(walk.pool[3], before)


@pytest.mark.parametrize("spoil", ["huge v", "NaN", "zero keys", "opposite keys", "denormal"])
def test_extremes_stay_in_their_sequence(spoil: str) -> None:
    walk, plain = (Walk(Shape((1, 1, 2), 4, 4, F64, fold_every=3)) for _ in range(2))
    for walked in (walk, plain):
        one, other = walked.start(0), walked.start(1)
        for step in range(7):
            rows = walked.rows_of(["layer"] * 2, [1, 1])
            if walked is walk:
                if spoil == "huge v":
                    rows["v"][0, 0] *= 1e30
                if spoil == "NaN" and step == 2:
                    rows["v"][0, 0] = torch.nan
                if spoil == "zero keys":
                    rows["k"][0, 0] = 0
                if spoil == "opposite keys":
                    rows["k"][0, 0] = (-1) ** step
                if spoil == "denormal":
                    rows["g"][0, 0] = -700
            o, _ = gdn.fused_recurrent_gated_delta_rule(
                **rows, initial_state=walked.pool, cu_seqlens=torch.tensor([0, 1, 2]), ssm_state_indices=walked.ints([0, 1]),
                use_qk_l2norm_in_kernel=True, **walked.replay([one.tokens + step, other.tokens + step]),
            )  # fmt: skip
            outputs, states = walked.exact(rows, 0, 1, one.truth, None)
            one.truth = states[0]
            assert (
                o[0, 0].isnan().any()
                if spoil == "NaN" and walked is walk and step >= 2
                else worst_head(o[0, 0], outputs[0]) < 1e-9
            )
    assert same_bits(walk.pool[1], plain.pool[1]) and same_bits(walk.ring[1], plain.ring[1])


def test_a_chain_as_a_tree_is_a_line() -> None:
    lines, trees = (Walk(Shape((2, 2, 4), 6, 6, most=4, fold_every=5), seed=3) for _ in range(2))
    one, other = lines.start(2), trees.start(2)
    for _ in range(8):
        length = 1 + lines.draw(4)
        assert trees.draw(4) == length - 1
        first, second = lines.decode([one], [length]), trees.decode([other], [length], parents=[list(range(-1, length - 1))])
        assert same_bits(first, second) and one.tokens == other.tokens
    assert same_bits(lines.pool[2], trees.pool[2]) and same_bits(lines.ring[2], trees.ring[2])
