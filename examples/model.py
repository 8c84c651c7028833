"""A hybrid model on paged caches: one step with two prompts, then steps of one token, as a serving engine runs them."""

import torch

from gdn.layers import (
    AttentionMetadataBuilder,
    CacheAllocator,
    CachedSequence,
    GDNMetadataBuilder,
    HybridCaches,
    HybridConfig,
    HybridModel,
    StepMetadata,
)
from gdn.layers.random_weights import fill_randomly

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_SIZE, MAX_LEN, STEPS = 16, 128, 8

config = HybridConfig(  # `HybridConfig.from_transformers` takes a checkpoint's configuration
    vocab_size=256, hidden_size=128, num_hidden_layers=4, layer_types=("linear_attention",) * 3 + ("full_attention",),
    num_attention_heads=2, num_key_value_heads=1, head_dim=128, max_position_embeddings=MAX_LEN, intermediate_size=256,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
)  # fmt: skip
model = HybridModel(config, device=DEVICE, dtype=torch.bfloat16)
fill_randomly(model)  # `gdn.layers.loading.load` fills it from a checkpoint

caches = HybridCaches(config, num_blocks=32, block_size=BLOCK_SIZE, max_num_sequences=4, device=DEVICE)
allocator = CacheAllocator(caches)
gdn_builder = GDNMetadataBuilder(DEVICE, replay=caches.gdn.has_replay)
attention_builder = AttentionMetadataBuilder(DEVICE, block_size=BLOCK_SIZE, max_seq_len=MAX_LEN)


@torch.inference_mode()
def run(sequences: list[CachedSequence], new_tokens: list[list[int]]) -> list[int]:
    """One step: the new tokens of each sequence, packed. Returns each sequence's most likely next token."""
    query_lens, seq_lens = [len(tokens) for tokens in new_tokens], [sequence.num_tokens for sequence in sequences]
    step = StepMetadata(
        gdn_builder.build(query_lens, seq_lens, [sequence.state_slots for sequence in sequences]),
        attention_builder.build(
            query_lens, seq_lens, [sequence.blocks for sequence in sequences], [sequence.slot for sequence in sequences]
        ),
    )
    ids = torch.tensor([token for tokens in new_tokens for token in tokens], device=DEVICE)
    positions = [torch.arange(length - count, length) for count, length in zip(query_lens, seq_lens, strict=True)]
    hidden_states = model(ids, torch.cat(positions).to(DEVICE), step, caches)
    last = torch.tensor(query_lens, device=DEVICE).cumsum(0) - 1  # the last row of each sequence
    tokens: list[int] = model.greedy_tokens(model.compute_logits(hidden_states[last])).tolist()
    return tokens


prompts = [list(range(40)), list(range(100, 117))]
sequences = allocator.add_prompts(prompts)
texts = [[token] for token in run(sequences, prompts)]
for _ in range(STEPS):
    allocator.extend_all(sequences, [1, 1])
    for text, token in zip(texts, run(sequences, [[text[-1]] for text in texts]), strict=True):
        text.append(token)
for sequence, text in zip(sequences, texts, strict=True):
    print(f"{sequence.num_tokens} tokens in {len(sequence.blocks)} blocks; generated {text}")
    allocator.free(sequence)
