"""The rules of the metadata of Gated DeltaNet layers, stated row by row in plain Python."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One sequence of a step."""

    new: int
    before: int  # tokens before this step
    slots: tuple[int, ...]
    drafts: int = -1
    accepted: int = 1
    on_prompt: bool = True


def starts(lengths: list[int]) -> list[int]:
    total, found = 0, [0]
    for length in lengths:
        total += length
        found.append(total)
    return found


def places(rows: list[Row], spec: bool) -> list[int]:
    """Places in the step of the tokens of speculative rows, or of the others."""
    found, place = [], 0
    for row in rows:
        for _ in range(row.new):
            if (row.drafts >= 0) == spec:
                found.append(place)
            place += 1
    return found


def split(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Decode rows and, from the first prefill on, prefill rows, of a batch without speculation."""
    for place, row in enumerate(rows):
        is_first_chunk = row.before == 0 and row.on_prompt
        if row.new > 1 or (row.new == 1 and is_first_chunk):
            return rows[:place], rows[place:]
    return rows, []


def expected(rows: list[Row]) -> dict[str, Any]:
    """Fields of the metadata as lists; None where a field is absent."""
    spec = [row for row in rows if row.drafts >= 0]
    if not any(row.new for row in spec):
        decodes, prefills = split(rows)
        found = counts(decodes=decodes, prefills=prefills)
        others = rows if prefills else [row for row in rows if row.new]
    else:
        others = [row for row in rows if row.drafts < 0]
        prefills = others
        found = counts(prefills=others, spec=spec)
        found["spec_query_start_loc"] = starts([row.new for row in spec])
        found["spec_state_indices_tensor"] = [list(row.slots) for row in spec]
        found["spec_sequence_masks"] = [row.drafts >= 0 for row in rows]
        found["spec_token_indx"] = places(rows, True)
        found["non_spec_token_indx"] = places(rows, False)
        found["num_accepted_tokens"] = [row.accepted for row in spec]
        if not any(row.new for row in others):
            return found
    found["non_spec_query_start_loc"] = starts([row.new for row in others])
    found["non_spec_state_indices_tensor"] = [row.slots[0] for row in others]
    found["non_spec_lengths_host"] = tuple(row.new for row in others)
    if any(row.new for row in prefills):
        found["has_initial_state"] = [row.before > 0 for row in others]
    return found


def counts(decodes: Any = (), prefills: Any = (), spec: Any = ()) -> dict[str, int]:
    found = {}
    for name, rows in (("prefill", prefills), ("decode", decodes), ("spec_decode", spec)):
        found[f"num_{name}s"] = sum(row.new > 0 for row in rows)
        found[f"num_{name}_tokens"] = sum(row.new for row in rows)
    found["num_actual_tokens"] = sum(row.new for kind in (decodes, prefills, spec) for row in kind)
    return found
