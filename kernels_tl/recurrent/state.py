"""A head's state between registers and a slot of the pool.

Accesses wider than one element use flat offsets in units of their width: strides are multiples of it, which the compiler cannot
know.
"""

import tilelang.language as T

from gdn.problem import DTYPE_BYTES
from kernels_tl.common import build
from kernels_tl.common.rounding import make_key, round_value
from kernels_tl.recurrent.spec import first_entry, k_exists, v_exists


def state_unit(spec, slot_offset, place, r, c, width):
    """Offset of access (r, c), in units of `width` values; slot_offset: the slot's, in the same units."""
    p = spec.problem
    if p.state_v_first:
        per_chunk = spec.vector // width
        column = place.head * p.head_v_dim + place.v_start + r
        within = column * (p.head_k_dim // width) + (c // per_chunk * spec.lanes + place.lane) * per_chunk + c % per_chunk
    else:
        entry = place.head * p.head_k_dim + first_entry(spec, r // spec.vector, place.lane) + r % spec.vector
        within = entry * (p.head_v_dim // width) + place.v_start // width + c
    return slot_offset + within


def outer_accesses(spec):
    """Number of r in the accesses (r, c) of a state.

    r counts columns and c accesses along K (V first), or r counts K entries and c accesses along V."""
    return spec.columns if spec.problem.state_v_first else spec.entries


def inner_accesses(spec, width):
    """Number of c, of `width` values each."""
    return (spec.entries if spec.problem.state_v_first else spec.columns) // width


def first_register(spec, r, c, width):
    """First register of an access."""
    return r * (spec.entries if spec.problem.state_v_first else spec.columns) + c * width


def entry_of(spec, place, r, c, width):
    """First K entry of an access."""
    return first_entry(spec, c * width // spec.vector if spec.problem.state_v_first else r // spec.vector, place.lane)


def element_of(spec, place, r, c, e):
    """k * V + v of value e of an access."""
    V = spec.problem.head_v_dim
    first = first_entry(spec, 0, place.lane) * V + place.v_start
    if spec.problem.state_v_first:
        entry = c * spec.width + e
        return first + (entry // spec.vector * spec.lanes * spec.vector + entry % spec.vector) * V + r
    return first + (r // spec.vector * spec.lanes * spec.vector + r % spec.vector) * V + c * spec.width + e


@T.macro
def load_state(spec, slot, place, pool, state):
    for r in T.unroll(outer_accesses(spec)):
        for c in T.unroll(inner_accesses(spec, spec.width)):
            if v_exists(spec, place.v_start) and k_exists(spec, entry_of(spec, place, r, c, spec.width)):
                for e in T.vectorized(spec.width):
                    unit = state_unit(spec, slot * (pool.strides[0] // spec.width), place, r, c, spec.width)
                    state[first_register(spec, r, c, spec.width) + e] = pool[0, 0, 0, unit * spec.width + e]


@T.macro
def store_state(spec, slot, width, store_dtype, place, target, state):
    for r in T.unroll(outer_accesses(spec)):
        for c in T.unroll(inner_accesses(spec, width)):
            if v_exists(spec, place.v_start) and k_exists(spec, entry_of(spec, place, r, c, width)):
                for e in T.vectorized(width):
                    unit = state_unit(spec, slot * (target.strides[0] // width), place, r, c, width)
                    target[0, 0, 0, unit * width + e] = T.cast(state[first_register(spec, r, c, width) + e], store_dtype)


@T.macro
def store_intermediate(spec, row, token, place, target, state):
    """Stores the state at [row, token] of intermediate_states, rounded to nearest."""
    width = min(spec.width, 16 // DTYPE_BYTES[spec.problem.intermediate_dtype])
    for r in T.unroll(outer_accesses(spec)):
        for c in T.unroll(inner_accesses(spec, width)):
            if v_exists(spec, place.v_start) and k_exists(spec, entry_of(spec, place, r, c, width)):
                for e in T.vectorized(width):
                    first = row * (target.strides[0] // width) + token * (target.strides[1] // width)
                    unit = state_unit(spec, first, place, r, c, width)
                    value = state[first_register(spec, r, c, width) + e]
                    target[0, 0, 0, 0, unit * width + e] = T.cast(value, spec.problem.intermediate_dtype)


@T.macro
def store_rounded(spec, slot, place, seed, pool, state):
    """Stores into the pool, with the noise of the seed."""
    key, noise = build.variables(2, "uint32")
    rounded = T.alloc_local((spec.width,), "float32")
    make_key(seed, slot, place.head, key)
    for r in T.unroll(outer_accesses(spec)):
        for c in T.unroll(inner_accesses(spec, spec.width)):
            for e in T.unroll(spec.width):
                element = element_of(spec, place, r, c, e)
                round_value(state[first_register(spec, r, c, spec.width) + e], key, element, noise, rounded[e])
            if v_exists(spec, place.v_start) and k_exists(spec, entry_of(spec, place, r, c, spec.width)):
                for e in T.vectorized(spec.width):
                    unit = state_unit(spec, slot * (pool.strides[0] // spec.width), place, r, c, spec.width)
                    pool[0, 0, 0, unit * spec.width + e] = T.cast(rounded[e], spec.problem.state_dtype)


@T.macro
def store_into_pool(spec, slot, place, seed, pool, state):
    if spec.problem.has_rounding:
        store_rounded(spec, slot, place, seed, pool, state)
    else:
        store_state(spec, slot, spec.width, spec.problem.state_dtype, place, pool, state)
