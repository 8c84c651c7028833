"""The rules of the sift without a GPU: which keys are sampled, how votes become places, and that the lists decide exactly."""

import math
import random

import pytest
import torch

from gdn.ops._sift import HEADER, LEAST_TILES, LIST_ENTRIES, SAMPLED, WARPS, room_for, steps_for

MIB = 2**20
AT_ONCE, BLOCKS = 16, 132


def key_of(sample: int) -> int:
    return SAMPLED * sample + ((5 * sample + sample // SAMPLED * 3) & (SAMPLED - 1))


def sampled_before(key: int) -> int:
    return key // SAMPLED + (key_of(key // SAMPLED) < key)


def test_a_range_sees_the_sampled_keys_that_lie_in_it() -> None:
    keys = [key_of(sample) for sample in range(300)]
    assert [key // SAMPLED for key in keys] == list(range(300))
    assert len({key % SAMPLED for key in keys}) == SAMPLED
    for key in range(4700):
        assert sampled_before(key) == sum(one < key for one in keys)


@pytest.mark.parametrize("seed", range(20))
def test_votes_give_places_without_gaps(seed: int) -> None:
    """The instructions of `list_two`, for all lanes of a warp."""
    chance = random.Random(seed)
    near, far = ([chance.random() < 0.3 for _ in range(32)] for _ in range(2))
    votes = [sum(hit << lane for lane, hit in enumerate(hits)) for hits in (near, far)]
    for query in range(4):
        places = []
        for lane in range(query, 32, 4):
            turned = (query + 31) % 32
            moved = votes[0] >> query & 0x11111111
            moved |= (votes[1] >> turned | votes[1] << 32 - turned) & 0x22222222
            place = (moved & (1 << (lane & 28)) - 1).bit_count()
            places += [place] * near[lane] + [place + near[lane]] * far[lane]
        assert places == list(range(sum(near[query::4]) + sum(far[query::4])))
        assert moved.bit_count() == len(places)


def pieces(tiles: list[int]) -> list[list[int]]:
    """How runs of equal cost cut the key tiles of query tiles (an item costs one tile more)."""
    share = -(-sum(length + 1 for length in tiles if length) // BLOCKS)
    found, start = [], 0
    for length in tiles:
        first, last = start // share, (start + length) // share
        edges = [min(max(block * share - start - 1, 0), length) for block in range(first, last + 2)]
        found.append([b - a for a, b in zip(edges, edges[1:], strict=False) if b > a])
        start += length + 1 if length else 0
    return found


@pytest.mark.parametrize("tiles", [64, 67, LEAST_TILES, 128, 131, 132, 133, 256])
@pytest.mark.parametrize("most", [256, 512, 2048])
def test_nearly_every_piece_finds_a_list(tiles: int, most: int) -> None:
    for lengths in ([most] * tiles, [most - tiles // 2 + i // 2 for i in range(tiles)]):
        small = [sum(2 * piece <= length for piece in cut) for cut, length in zip(pieces(lengths), lengths, strict=True)]
        without = sum(count > 3 for count in small)
        assert without <= (3 if tiles < 70 else 0)


def sift(scores: torch.Tensor, k: int, cuts: list[int], is_large: list[bool]) -> list[int] | None:
    """A row's answer from its lists, None where they do not give one. cuts: key tiles where pieces begin."""
    room = room_for(k)
    assert room is not None
    count = scores.numel()
    bound = torch.tensor(-torch.finfo(torch.float32).max)
    sample = scores[[key_of(j) for j in range(sampled_before(count))]]
    valid = sample[sample > -math.inf].sort(descending=True).values
    if count > room.listed and valid.numel() >= room.rank:
        bound = valid[room.rank - 1]
    passed = (scores >= bound).nonzero()[:, 0]
    lists, others = [[0] * WARPS for _ in range(4)], 0
    for cut, end, large in zip(cuts, [*cuts[1:], count], is_large, strict=True):
        number, others = (0, others) if large else (others + 1, others + 1)
        if number > 3:
            return None
        inside = passed[(passed >= cut * 64) & (passed < (end if end == count else end * 64))]
        lists[number] = [int((inside % 64 // 16 == warp).sum()) for warp in range(WARPS)]
    part = [room.entries // WARPS] * 2 + [room.entries // WARPS // 2] * 2
    for warp in range(WARPS):
        if any(lists[number][warp] >= part[number] - AT_ONCE for number in range(4)):
            return None
        if any(lists[number][warp] + lists[number + 1][warp] > part[number] for number in (0, 2)):
            return None
    is_all = bound == -torch.finfo(torch.float32).max
    if passed.numel() > LIST_ENTRIES or (passed.numel() < k and not is_all):
        return None
    ordered = sorted(passed.tolist(), key=lambda column: (-float(scores[column]), column))
    return sorted(ordered[:k])


def exact(scores: torch.Tensor, k: int) -> list[int]:
    valid = [column for column, score in enumerate(scores.tolist()) if score > -math.inf]
    return sorted(sorted(valid, key=lambda column: (-scores[column].item(), column))[:k])


def rows(keys: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(keys)
    normal = torch.randn(keys, generator=generator)
    return {
        "normal": normal,
        "ReLU": normal.clamp(min=0.0),
        "tied": (normal * 8).round() / 8,
        "equal": torch.ones(keys),
        "zeros": torch.where(torch.arange(keys) % 3 == 0, -0.0, 0.0),
        "ascending": torch.arange(keys).float(),
        "infinite": torch.where(torch.arange(keys) % 2 == 0, math.inf, -math.inf),
        "NaN": torch.where(torch.arange(keys) % 5 == 0, math.nan, normal),
        "few": torch.where(torch.arange(keys) % 37 == 0, normal, -math.inf),
        "sampled": normal + 50.0 * torch.isin(torch.arange(keys), torch.tensor([key_of(j) for j in range(keys // 16)])),
    }


@pytest.mark.parametrize("keys", [900, 2600, 9000, 20000])
@pytest.mark.parametrize("cut", [([0], [True]), ([0, 40], [False, True]), ([0, 100, 200], [False, False, False])], ids=str)
def test_lists_that_answer_are_right(keys: int, cut: tuple[list[int], list[bool]]) -> None:
    answered = {}
    for name, scores in rows(keys).items():
        answer = sift(scores, 500, *([[0], [True]] if keys < 6000 else cut))
        answered[name] = answer is not None
        assert answer is None or answer == exact(scores, 500), name
    assert answered["normal"] and answered["NaN"]
    assert keys < 6000 or not (answered["equal"] or answered["zeros"] or answered["sampled"] or answered["infinite"])


def test_a_bound_is_seldom_wrong() -> None:
    generator = torch.Generator().manual_seed(3)
    room = room_for(2048)
    assert room is not None
    for _ in range(40):
        scores = torch.randn(32768, generator=generator)
        sample = scores[[key_of(j) for j in range(2048)]]
        passed = int((scores >= sample.sort(descending=True).values[room.rank - 1]).sum())
        assert 2048 <= passed <= LIST_ENTRIES and abs(passed - SAMPLED * room.rank) < 5 * SAMPLED * math.sqrt(room.rank)


@pytest.mark.parametrize("k", [1, 64, 512, 1000, 2048, 2051])
def test_room(k: int) -> None:
    room = room_for(k)
    assert room is not None
    assert room.entries % 64 == 0 and SAMPLED * room.rank < room.listed <= LIST_ENTRIES
    of_warp = -(-room.listed // 64) * 16 + 16
    assert of_warp < room.entries // WARPS - AT_ONCE and of_warp // 2 + 16 < room.entries // WARPS // 2 - AT_ONCE
    assert room.row_words >= HEADER + 131072 // SAMPLED or k < 2048
    assert room_for(4096) is None


def test_steps() -> None:
    goal = steps_for(4096, 32768, 16, 2048, 256 * MIB)
    assert goal is not None and (goal.rows, goal.scored) == (4096, 2048)
    for budget in (220, 256, 512):
        found = steps_for(4096, 32768, 16, 2048, budget * MIB)
        assert found is not None
        assert found.rows * found.room.row_words * 4 <= budget * MIB and found.scored * 32768 * 4 <= budget * MIB
    assert steps_for(4096, 32768, 16, 2048, 128 * MIB) is None  # too few rows at a time
    assert steps_for(8192, 32768, 16, 2048, 128 * MIB) is None
    assert steps_for(3000, 32768, 16, 2048, 256 * MIB) is None  # too few rows
    assert steps_for(4096, 16000, 16, 2048, 256 * MIB) is None  # too few keys
    assert steps_for(4096, 2**18, 16, 2048, 512 * MIB) is None  # too many
