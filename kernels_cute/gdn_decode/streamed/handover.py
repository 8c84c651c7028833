"""Numbers of an item, which the warps that prepare it hand to those that multiply its states."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from kernels_cute.common import ptx
from kernels_cute.common.ring import Live
from kernels_cute.gdn_decode.streamed.sizes import ITEM_WORDS
from kernels_cute.gdn_decode.streamed.spec import Item, Shared


@cute.jit
def publish(item: Item, live: Live, shared: Shared):
    """By one thread, before it arrives at `ready`."""
    words = [item.key_head, item.begin, item.count, item.slot, live.base, live.count, live.start, live.target]
    ptx.store_words(shared.item, words[:4])
    ptx.store_words(shared.item + 16, words[4:])
    ptx.store_word(shared.item + 4 * (ITEM_WORDS - 1), Int32(live.is_valid))


@cute.jit
def publish_end(shared: Shared):
    """No item follows: a key head below zero."""
    ptx.store_word(shared.item, Int32(-1))


def key_head_of(shared: Shared) -> Any:
    """Of the published item, below zero where there is none."""
    return ptx.load_word(shared.item)


def published(shared: Shared) -> tuple[Item, Live]:
    """The item without its positions, and its entries."""
    key_head, begin, count, slot = ptx.load_words(shared.item)
    base, before, start, target = ptx.load_words(shared.item + 16)
    is_valid = ptx.load_word(shared.item + 4 * (ITEM_WORDS - 1)) != 0
    return Item(key_head, begin, count, slot, None, None, None), Live(base, before, start, target, is_valid)
