"""The noise of stochastic rounding is fixed for ever: kernels reproduce it."""

import math

import torch

from gdn.ops.delta_rule.inputs import recurrent_inputs, recurrent_problem
from gdn.ops.delta_rule.tokens import mix, noise, stochastic_bfloat16
from gdn.testing.compare import same_bits
from tests.references import reference

CPU = torch.device("cpu")


def scalar_mix(x: int) -> int:
    """The same finaliser on Python integers."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def test_mix_is_the_integer_function() -> None:
    values = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 123456789]
    assert mix(torch.tensor(values)).tolist() == [scalar_mix(x) for x in values]


def test_noise_by_its_definition() -> None:
    seed, slot = 0x1234_5678_9ABC_DEF0, 2**31 + 5
    got = noise(seed, slot, 3, 4, 6, CPU)
    for head, k_index, v_index in ((0, 0, 0), (2, 3, 5), (1, 2, 4)):
        key = scalar_mix(scalar_mix(scalar_mix(scalar_mix(seed % 2**32) ^ (seed >> 32)) ^ slot) ^ head)
        assert int(got[head, k_index, v_index]) == scalar_mix(key ^ (k_index * 6 + v_index)) >> 16


def test_rounding_is_right_on_average() -> None:
    value = torch.full((1, 64, 64), 1.0 + 2.0**-9)  # a quarter of the way from 1 to the next bfloat16
    rounded = stochastic_bfloat16(value, seed=7, slot=3).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2.0**-7}
    share = float((rounded > 1).float().mean())
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / 4096) ** 0.5
    assert float(stochastic_bfloat16(-value, seed=7, slot=3).float().mean()) == -float(rounded.mean())


def test_what_bfloat16_holds_stays() -> None:
    value = torch.tensor([[[0.0, -0.0, 1.5, -3.0, torch.inf, -torch.inf, torch.nan, 2.0**-120]]])
    assert same_bits(stochastic_bfloat16(value, 1, 1), value.to(torch.bfloat16))


def test_operator_rounds_with_the_noise_of_its_slots_whatever_the_layout() -> None:
    stored = []
    for v_first in (False, True):
        problem = recurrent_problem(state_dtype="bfloat16", index_dtype="int32", has_rounding=True)
        arguments = recurrent_inputs(problem, lengths=[2, 1])
        arguments["initial_state"] = arguments["initial_state"].mT.contiguous() if v_first else arguments["initial_state"]
        start = arguments["initial_state"].clone()
        arguments["state_v_first"] = v_first
        _, pool = reference.fused_recurrent_gated_delta_rule(**arguments)
        stored.append(pool.mT if v_first else pool)  # type: ignore[union-attr]
        # The same call with a float32 pool gives what was rounded.
        wide = {**arguments, "initial_state": start.float()}
        _, exact = reference.fused_recurrent_gated_delta_rule(**wide)
        for slot in arguments["ssm_state_indices"].tolist():
            state = exact[slot].mT if v_first else exact[slot]  # type: ignore[index]
            expected = stochastic_bfloat16(state, int(arguments["rounding_seed"]), slot)
            assert same_bits(stored[-1][slot].contiguous(), expected)
    live = arguments["ssm_state_indices"].long()
    assert same_bits(stored[0][live].contiguous(), stored[1][live].contiguous())


def test_slow_decay_survives_4096_steps() -> None:
    """A factor within half a unit of 1 is lost by ordinary rounding every time, and kept on average by the noise."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1, 24, 24, generator=generator).to(torch.bfloat16)
    factor = torch.exp(torch.tensor(-(2.0**-12)))
    nearest, noisy = start.float(), start.float()
    for step in range(4096):
        nearest = (factor * nearest).to(torch.bfloat16).float()
        noisy = stochastic_bfloat16(factor * noisy, seed=step, slot=1).float()
    wanted = math.exp(-1.0) * start.double()
    assert torch.equal(nearest, start.float())  # nothing is forgotten: an error of e - 1
    assert float((noisy - wanted).norm() / wanted.norm()) < 0.12
    assert abs(float((noisy * wanted).sum() / wanted.square().sum()) - 1) < 0.03
