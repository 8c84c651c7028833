"""The demo's engine against one pass of the same model over whole sequences, on other caches with metadata stated plainly.

Failures at any place: test_engine_walks.py.
"""

import copy
import itertools
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch

from gdn.cli.demo.drafts import accept_greedily, ngram_drafts, random_drafts
from gdn.cli.demo.engine import Engine, EngineSizes, Stream, StreamLostError
from gdn.layers import CacheFullError, HybridModel
from gdn.layers.random_weights import fill_randomly
from tests.layers.serving import Server
from tests.layers.small import small_config

TOLERANCE = 2e-5  # of the largest logit, float32
LENGTHS = (1, 130, 64, 3, 65)  # a first chunk of one token, ragged prompts around the chunk of 64
FORMS: dict[str, dict[str, Any]] = {
    "token-wise": {},
    "compressed": {"index_ratio": 4},
    "dense, experts": {"index_topk": 0, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
LAYERS = ("linear_attention", "full_attention", "linear_attention")


def make_model(form: str = "token-wise", null_slot: int = -1, **changes: Any) -> HybridModel:
    """changes: of the configuration."""
    shared = {"num_hidden_layers": 3, "layer_types": LAYERS, "intermediate_size": 24, "shared_expert_intermediate_size": 8}
    config = small_config(**shared, vocab_size=61, **FORMS[form], **changes)
    model = HybridModel(config, null_slot=null_slot, dtype=torch.float32)
    fill_randomly(model)
    return model


def make_prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(61) for _ in range(length)] for length in lengths]


def make_engine(model: HybridModel, **changes: Any) -> Engine:
    options = {name: changes.pop(name) for name in ("use_graphs", "null_slot", "replay") if name in changes}
    return Engine(model, EngineSizes(**{"max_num_sequences": 6, "max_seq_len": 200, "block_size": 48} | changes), **options)


def one_pass(model: HybridModel, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Logits [length, vocab] of each sequence."""
    return Server(model, model.config, len(sequences), max(map(len, sequences))).step(sequences)


class Recorder:
    """Logits that an engine reports, by stream and by the position after which they are."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.seen = engine, {}
        engine.on_logits = self.record

    def record(self, streams: list[Stream], rows: list[int], logits: torch.Tensor) -> None:
        assert logits.shape[0] == sum(rows)
        for stream, part in zip(streams, logits.clone().split(rows), strict=True):
            self.seen.setdefault(id(stream), []).append(part)

    def error(self, stream: Stream, whole: torch.Tensor, first: int) -> float:
        """Largest difference of the steps' logits from position `first` on, as a share of the largest logit."""
        found = torch.cat(self.seen[id(stream)])
        wanted = whole[first : first + found.shape[0]]
        assert found.shape == wanted.shape
        return float((found - wanted).abs().max() / whole.abs().max())


@pytest.mark.parametrize("use_graphs", [False, True], ids=["any shape", "fixed shapes"])
@pytest.mark.parametrize("num_spec", [0, 2])
@pytest.mark.parametrize("form", FORMS)
def test_prefill_and_decode_equal_one_pass(form: str, num_spec: int, use_graphs: bool) -> None:
    model, prompts = make_model(form), make_prompts()
    engine = make_engine(model, num_spec=num_spec, use_graphs=use_graphs)
    recorder = Recorder(engine)
    first = engine.prefill(prompts)
    decoded = engine.decode(6)
    assert first.num_tokens == sum(LENGTHS) and decoded.num_tokens == 6 * len(LENGTHS)
    assert first.tokens_per_second > 0 and decoded.tokens_per_second > 0
    sequences = [stream.tokens for stream in engine.streams]
    wholes = one_pass(model, [tokens[:-1] for tokens in sequences])
    for prompt, stream, whole, new, started in zip(prompts, engine.streams, wholes, decoded.tokens, first.tokens, strict=True):
        assert stream.tokens == prompt + started + new
        assert recorder.error(stream, whole, len(prompt) - 1) <= TOLERANCE
        assert whole[len(prompt) - 1 :].argmax(-1).tolist() == started + new


@pytest.mark.parametrize("form", FORMS)
def test_chunks_of_a_prompt_equal_one_pass(form: str) -> None:
    model, prompts = make_model(form), make_prompts((1, 130, 64, 200))
    engine = make_engine(model)
    engine.prefill(prompts, chunk=64)
    for prompt, stream, whole in zip(prompts, engine.streams, one_pass(model, prompts), strict=True):
        assert stream.tokens == [*prompt, int(whole[-1].argmax())]


@pytest.mark.parametrize("use_graphs", [False, True], ids=["any shape", "fixed shapes"])
@pytest.mark.parametrize("form", FORMS)
def test_verified_drafts_are_what_decode_would_generate(form: str, use_graphs: bool) -> None:
    """Drafts that are right, wrong from some place on, too few, or none; then plain decode goes on from the accepted state."""
    model, prompts = make_model(form), make_prompts()
    plain = make_engine(model)
    plain.prefill(prompts)
    plain.decode(24)
    wanted = [stream.tokens for stream in plain.streams]
    engine = make_engine(model, num_spec=3, use_graphs=use_graphs)
    engine.prefill(prompts)
    pairs = itertools.cycle([(3, 3), (3, 0), (2, 1), (0, 0), (1, 1), (3, 2)])  # drafts, and how many of them are right
    lengths = []
    for _ in range(4):
        drafts = []
        for stream, tokens in zip(engine.streams, wanted, strict=True):
            count, right = next(pairs)
            true = tokens[len(stream.tokens) : len(stream.tokens) + count]
            drafts.append([token if i < right else (token + 1) % 61 for i, token in enumerate(true)])
            lengths.append(1 + min(count, right))
        done = engine.verify(drafts)
        assert [len(new) for new in done.tokens] == lengths[-len(prompts) :]
    assert {1, 2, 3, 4} == set(lengths)
    engine.decode(3)
    for stream, tokens in zip(engine.streams, wanted, strict=True):
        assert stream.tokens == tokens[: len(stream.tokens)]
        assert stream.cached.num_tokens == stream.num_computed == len(stream.tokens) - 1


@pytest.mark.parametrize("form", FORMS)
def test_scores_of_whole_sequences(form: str) -> None:
    """Scores start at any position, next to live streams, and nothing of them is kept; a full cache changes nothing."""
    model, sequences = make_model(form), make_prompts((1, 130, 64, 65))
    engine = make_engine(model, num_spec=2)
    engine.prefill(make_prompts((30,)))
    free = engine.allocator.num_free_blocks
    starts = [0, 100, 63, 0]
    for found, whole, start in zip(engine.score(sequences, starts), one_pass(model, sequences), starts, strict=True):
        assert found.shape == whole[start:].shape
        assert float((found - whole[start:]).abs().max() / whole.abs().max()) <= TOLERANCE
    with pytest.raises(CacheFullError):
        engine.score([[1]] * 6, [0] * 6)
    assert engine.allocator.num_free_blocks == free and len(engine.streams) == 1


@pytest.mark.parametrize("form", FORMS)
def test_scores_next_to_a_kept_prefix(form: str) -> None:
    """The prefix of 128 tokens has no rows in the pass: it is used where the scores begin at its end or later."""
    model, (prompt, other) = make_model(form), make_prompts((150, 90))
    engine = make_engine(model, num_checkpoints=2)
    engine.prefill([prompt])
    assert engine.allocator.num_kept == 1
    computed = []
    forward = model.forward
    model.forward = lambda ids, *rest: computed.append(len(ids)) or forward(ids, *rest)
    whole, of_other = one_pass(model, [prompt, other])
    for start, rows in ((0, 150), (100, 150), (127, 150), (128, 22), (149, 22)):
        computed.clear()
        for found, wanted in zip(engine.score([prompt, other], [start, 5]), (whole[start:], of_other[5:]), strict=True):
            assert found.shape == wanted.shape and float((found - wanted).abs().max() / whole.abs().max()) <= TOLERANCE
        assert computed == [rows + 90]
    assert engine.score([], []) == []


@pytest.mark.parametrize("form", FORMS)
def test_teacher_forcing(form: str) -> None:
    model, prompts = make_model(form), make_prompts()
    forced = make_prompts((5,) * len(prompts), seed=9)
    engine = make_engine(model)
    recorder = Recorder(engine)
    engine.prefill(prompts)
    engine.decode(5, forced=forced)
    started = [stream.tokens[len(prompt)] for stream, prompt in zip(engine.streams, prompts, strict=True)]
    for stream, prompt, token, given in zip(engine.streams, prompts, started, forced, strict=True):
        assert stream.tokens == [*prompt, token, *given]
        (whole,) = one_pass(model, [stream.tokens[:-1]])
        assert recorder.error(stream, whole, len(prompt) - 1) <= TOLERANCE


@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize("form", FORMS)
def test_a_kept_prefix_gives_what_one_pass_gives(form: str, chunk: int | None) -> None:
    """The prefix outlives the stream that made it; the blocks of 48 tokens end inside the prefix of 128."""
    model = make_model(form)
    engine = make_engine(model, num_checkpoints=2)
    (prompt, tail) = make_prompts((150, 40))
    recorder = Recorder(engine)
    engine.prefill([prompt], chunk)
    assert engine.allocator.num_kept == 1
    other = prompt[:140] + tail
    again = engine.prefill([prompt, other], chunk)
    assert again.num_tokens == (150 - 128) + (180 - 128)
    engine.finish(engine.streams[0])
    engine.decode(4)
    engine.finish()
    engine.prefill([other], chunk)
    assert engine.streams[0].cached.num_cached_tokens == 128
    engine.decode(4)
    (whole,) = one_pass(model, [engine.streams[0].tokens[:-1]])
    found = torch.cat(recorder.seen[id(engine.streams[0])])[-5:]
    assert float((found - whole[179:]).abs().max() / whole.abs().max()) <= TOLERANCE
    engine.finish()
    assert engine.allocator.num_free_sequences == 6


@pytest.mark.parametrize("form", FORMS)
def test_forks_go_on_by_themselves(form: str) -> None:
    """A fork in the middle of a block, a group and a speculative window; both streams equal one pass over their tokens."""
    model = make_model(form)
    engine = make_engine(model, num_spec=3)
    (prompt,) = make_prompts((77,))
    engine.prefill([prompt])
    truth = make_engine(model)
    truth.prefill([prompt])
    truth.decode(4)
    engine.verify([[*truth.streams[0].tokens[78:80], 0][:3]])
    assert engine.streams[0].accepted > 1
    engine.fork(engine.streams[0])
    recorder = Recorder(engine)
    known = len(engine.streams[0].tokens)
    engine.decode(8, forced=make_prompts((8, 8), seed=3))
    for stream in engine.streams:
        (whole,) = one_pass(model, [stream.tokens[:-1]])
        assert recorder.error(stream, whole, known - 1) <= TOLERANCE
    assert engine.streams[0].tokens[known:] != engine.streams[1].tokens[known:]


@pytest.mark.parametrize("num_spec", [0, 1])
def test_a_null_slot_of_zero(num_spec: int) -> None:
    """vLLM's convention: slot 0 is padding and never used, and the tokens are the same."""
    prompts, tokens = make_prompts(), []
    for null_slot in (-1, 0):
        model = make_model(null_slot=null_slot)
        engine = make_engine(model, null_slot=null_slot, num_spec=num_spec, use_graphs=True)
        engine.caches.gdn.ssm_states[0][0] = float("nan") if null_slot == 0 else 0.0
        engine.prefill(prompts)
        tokens.append(engine.decode(3).tokens)
    assert tokens[0] == tokens[1]
    assert engine.caches.gdn.ssm_states[0][0].isnan().all()


def test_filled_freed_and_refilled_gives_the_same_bits() -> None:
    model, prompts = make_model("compressed"), make_prompts((47, 90, 95, 140, 120, 180))
    engine = make_engine(model, num_blocks=17, num_spec=1)
    runs = []
    for _ in range(2):
        recorder = Recorder(engine)
        engine.prefill(prompts)
        engine.decode(1)
        assert (engine.allocator.num_free_sequences, engine.allocator.num_free_state_slots) == (0, 0)
        runs.append([torch.cat(recorder.seen[id(stream)]) for stream in engine.streams])
        engine.streams.reverse()
        engine.finish()
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


def test_a_full_cache_changes_nothing() -> None:
    model = make_model()
    engine = make_engine(model, num_blocks=7)
    with pytest.raises(CacheFullError):
        engine.prefill(make_prompts((200, 200)))
    assert engine.streams == [] and engine.allocator.num_free_blocks == 7
    engine.prefill(make_prompts((47, 48)))
    before = [list(stream.tokens) for stream in engine.streams]
    with pytest.raises(CacheFullError):
        engine.decode(120)
    assert [stream.tokens for stream in engine.streams] == before and engine.allocator.num_free_blocks == 5
    assert [len(new) for new in engine.decode(2).tokens] == [2, 2]


def test_a_full_cache_does_not_fail_a_step_that_has_begun() -> None:
    """Two prompts go on in the blocks where their kept prefixes end: giving up rejected drafts there needs no block."""
    model, prompts = make_model(), make_prompts((65, 66))
    plain = make_engine(model)
    plain.prefill(prompts)
    plain.decode(4)
    engine = make_engine(model, num_spec=3, num_blocks=4, num_checkpoints=2)
    engine.prefill(prompts)
    assert (engine.allocator.num_kept, engine.allocator.num_free_blocks) == (2, 0)
    wrong = [[(token + 1) % 61 for token in stream.tokens[-4:-1]] for stream in plain.streams]
    for _ in range(2):
        engine.verify(wrong)
    assert [stream.tokens for stream in engine.streams] == [stream.tokens[:-2] for stream in plain.streams]
    assert engine.allocator.num_kept == 2


def test_a_prefill_that_finds_no_room_keeps_the_prefixes() -> None:
    model, (prompt,) = make_model(), make_prompts((130,))
    engine = make_engine(model, num_blocks=5, num_checkpoints=1)
    engine.prefill([prompt])
    engine.finish()
    with pytest.raises(CacheFullError):
        engine.prefill([[1] * 180, [2] * 180])
    assert engine.allocator.num_kept == 1
    assert engine.prefill([prompt]).num_tokens == 2


@pytest.mark.parametrize("use_graphs", [False, True], ids=["any shape", "fixed shapes"])
@pytest.mark.parametrize("phase", ["decode", "verify"])
def test_streams_of_a_step_that_failed_after_its_launch_are_lost(phase: str, use_graphs: bool) -> None:
    """They can be finished, and nothing else; new streams go on next to them, and so does what they kept."""
    model, prompts = make_model(), make_prompts((130, 20))
    engine = make_engine(model, num_spec=2, num_checkpoints=1, use_graphs=use_graphs)
    engine.prefill(prompts)
    attend = model.layers[1].forward

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    model.layers[1].forward = fail  # the states of the first layer are written by then
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.decode(2) if phase == "decode" else engine.verify([[1], [2, 3]])
    model.layers[1].forward = attend
    lost = list(engine.streams)
    assert all(stream.is_lost for stream in lost)
    for use in (lambda: engine.decode(1), lambda: engine.verify([[], []])):
        with pytest.raises(StreamLostError, match="streams: expected none that is lost, got 2 of 2: finish these"):
            use()
    with pytest.raises(StreamLostError, match="stream: expected one that is not lost"):
        engine.fork(lost[0])
    assert engine.prefill([prompts[0]]).num_tokens == 2  # of the kept prefix
    for stream in lost:
        engine.finish(stream)
    recorder = Recorder(engine)
    engine.decode(3)
    (whole,) = one_pass(model, [engine.streams[0].tokens[:-1]])
    assert recorder.error(engine.streams[0], whole, 130) <= TOLERANCE
    engine.finish()
    assert engine.allocator.num_free_sequences == 6


@pytest.mark.parametrize("place", ["_to_device", "_metadata", "graphs"])
def test_a_step_that_fails_before_its_launch_changes_nothing(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork afterwards shares no block that the step would have filled."""
    model, prompts = make_model(), make_prompts((40, 20))
    engine = make_engine(model, use_graphs=True)
    engine.prefill(prompts)
    before = [(list(stream.tokens), stream.cached.num_tokens, list(stream.cached.blocks)) for stream in engine.streams]

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine, place, fail) if place != "graphs" else monkeypatch.setattr(engine._fixed, "get", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.decode(30)
    monkeypatch.undo()
    assert before == [(stream.tokens, stream.cached.num_tokens, stream.cached.blocks) for stream in engine.streams]
    engine.fork(engine.streams[0])
    recorder = Recorder(engine)
    engine.decode(30, forced=make_prompts((30, 30, 30), seed=5))
    for stream, length in zip(engine.streams, (40, 20, 40), strict=True):
        (whole,) = one_pass(model, [stream.tokens[:-1]])
        assert recorder.error(stream, whole, length) <= TOLERANCE


def test_the_handler_of_logits_may_not_call_the_engine() -> None:
    engine = make_engine(make_model())
    engine.prefill([[1, 2]])
    engine.on_logits = lambda *_: engine.finish()
    with pytest.raises(RuntimeError, match="on_logits: expected no call of the engine, which is in a step"):
        engine.decode(1)
    engine.on_logits = None
    engine.finish()
    engine.prefill([[1, 2]])
    assert len(engine.decode(1).tokens) == 1


@pytest.mark.parametrize("token", [True, 1.0, "1", None, np.float32(1), np.bool_(True), torch.tensor(True), torch.tensor(1.5)])
def test_a_token_is_an_integer(token: Any) -> None:
    """Wherever tokens come in, before anything is changed; named with its place."""
    engine = make_engine(make_model(), num_spec=1)
    engine.prefill([[1, 2]])
    for name, call in {
        r"prompts\[1\]\[1\]": lambda: engine.prefill([[3], [4, token]]),
        r"sequences\[0\]\[0\]": lambda: engine.score([[token]], [0]),
        r"drafts\[0\]\[0\]": lambda: engine.verify([[token]]),
        r"forced\[0\]\[1\]": lambda: engine.decode(2, forced=[[1, token]]),
    }.items():  # fmt: skip
        with pytest.raises(TypeError, match=f"^{name}: expected an int, got"):
            call()
    assert len(engine.streams) == 1 and engine.streams[0].cached.num_tokens == 2
    with pytest.raises(TypeError, match=r"prompts\[0\]: expected integers, got str"):
        engine.prefill(["12"])


@pytest.mark.parametrize("token", [-1, 61, 2**40, np.int64(61), torch.tensor(-1)])
def test_a_token_is_in_the_vocabulary(token: Any) -> None:
    engine = make_engine(make_model(), num_spec=1)
    engine.prefill([[1, 2]])
    for name, call in {
        r"prompts\[0\]\[0\]": lambda: engine.prefill([[token]]),
        r"sequences\[0\]\[1\]": lambda: engine.score([[0, token]], [0]),
        r"drafts\[0\]\[0\]": lambda: engine.verify([[token]]),
        r"forced\[0\]\[0\]": lambda: engine.decode(1, forced=[[token]]),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=rf"^{name}: expected a token of 0 to 60 \(vocab_size - 1\), got {int(token)}"):
            call()
    assert len(engine.streams) == 1 and engine.streams[0].cached.num_tokens == 2


def test_integers_of_other_libraries_are_tokens() -> None:
    prompts = make_prompts((5,) * 4)
    engine = make_engine(make_model())
    engine.prefill(prompts)
    wanted = engine.decode(2).tokens
    engine.finish()
    given = [np.array(prompts[0]), torch.tensor(prompts[1], dtype=torch.int32), [np.int16(one) for one in prompts[2]]]
    engine.prefill([*given, list(torch.tensor(prompts[3]))])
    assert engine.decode(2).tokens == wanted
    assert {type(token) for stream in engine.streams for token in stream.tokens} == {int}


def test_sequences_are_not_longer_than_the_positions_of_the_model() -> None:
    """Refused when the engine is made; later, positions after the table's last row would be its last row's."""
    model = make_model(max_position_embeddings=80)
    with pytest.raises(ValueError, match=r"max_seq_len: expected at most 80 \(max_position_embeddings of the model\), got 81"):
        make_engine(model, max_seq_len=81)
    engine = make_engine(model, max_seq_len=80)
    engine.prefill(make_prompts((79,)))
    engine.decode(1)
    with pytest.raises(ValueError, match=r"steps: expected at most 80 tokens of a sequence \(max_seq_len\), got 81"):
        engine.decode(1)


@pytest.mark.parametrize("layer", ["model", "attention", "indexer"])
@pytest.mark.parametrize("form", ["token-wise", "compressed"])
def test_layers_refuse_sequences_beyond_the_table(form: str, layer: str) -> None:
    """Metadata and caches that are not an engine's: known from the host's bound, before anything is written."""
    model = make_model(form, max_position_embeddings=32)
    server = Server(model, model.config, 1, 48)
    server.step([[1] * 30])
    before = copy.deepcopy(server.caches)
    attention = server._stated([0], [3], [30], [False], 0).attention
    keys, ring = server.caches.indexer.keys[0], server.caches.indexer.rings[0]
    rows, positions = torch.zeros(3, model.config.hidden_size), torch.arange(30, 33)
    calls = {
        "model": lambda: server.step([[1, 2, 3]]),
        "attention": lambda: model.layers[1].self_attn(rows, positions, attention, server.caches.kv.kv[0], keys, ring),
        "indexer": lambda: model.layers[1].self_attn.indexer(rows, positions, attention, keys, ring),
    }
    with pytest.raises(ValueError, match=r"max_seq_len: expected at most 32 tokens of a sequence .*, got 33"):
        calls[layer]()
    states = [*server.caches.gdn.conv_states, *server.caches.gdn.ssm_states, *server.caches.kv.kv[0], keys]
    was = [*before.gdn.conv_states, *before.gdn.ssm_states, *before.kv.kv[0], before.indexer.keys[0]]
    assert all(torch.equal(now, old) for now, old in zip(states, was, strict=True))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_not_copied(copied: Any) -> None:
    engine = make_engine(make_model())
    with pytest.raises(TypeError, match="Engine: expected no copy and no pickle of an engine"):
        copied(engine)


def test_sizes_and_null_slots_are_checked() -> None:
    for name, value in (("max_num_sequences", 0), ("max_seq_len", 0), ("num_spec", -1), ("num_blocks", -1), ("block_size", 0)):
        with pytest.raises(ValueError, match=f"{name}: expected at least"):
            make_engine(make_model(), **{name: value})
    with pytest.raises(TypeError, match="max_seq_len: expected an int, got float"):
        make_engine(make_model(), max_seq_len=8.0)
    for own, given in ((-1, 0), (0, -1)):  # a slot that one of them uses, and the other takes for padding
        with pytest.raises(ValueError, match=f"null_slot: expected {own}, the model's, got {given}"):
            make_engine(make_model(null_slot=own), null_slot=given)


def test_streams_that_are_no_live_ones_are_refused() -> None:
    engine, other = make_engine(make_model()), make_engine(make_model())
    engine.prefill([[1, 2], [3]])
    other.prefill([[1, 2]])
    done = engine.streams[0]
    engine.finish(done)
    free = engine.allocator.num_free_blocks
    for stream in (done, other.streams[0], copy.copy(engine.streams[0])):
        for use in (engine.fork, engine.finish):
            with pytest.raises(ValueError, match="stream: expected a live stream of this engine"):
                use(stream)
    assert engine.allocator.num_free_blocks == free and len(engine.streams) == 1


def test_a_full_cache_at_a_fork() -> None:
    engine = make_engine(make_model(), num_blocks=2)
    engine.prefill(make_prompts((50,)))
    with pytest.raises(CacheFullError):
        engine.fork(engine.streams[0])
    assert len(engine.streams) == 1 and engine.allocator.num_free_sequences == 5
    engine.decode(3)


def test_nothing_to_do() -> None:
    engine = make_engine(make_model(), num_spec=1)
    assert engine.prefill([]).tokens == [] and engine.decode(3).tokens == [] and engine.verify([]).tokens == []
    engine.prefill([[1, 2]])
    assert engine.decode(0).tokens == [[]] and engine.decode(0, forced=[[]]).tokens == [[]]
    assert engine.streams[0].cached.num_tokens == 2


def test_bad_input_is_named() -> None:
    engine = make_engine(make_model(), num_spec=1)
    with pytest.raises(ValueError, match="chunk: expected a positive multiple of 64, got 32"):
        engine.prefill([[1]], chunk=32)
    with pytest.raises(ValueError, match="prompts: expected 1 to 200 tokens each, got 0"):
        engine.prefill([[]])
    engine.prefill([[1, 2]])
    with pytest.raises(ValueError, match="drafts: expected 1 rows, one for each stream, got 0"):
        engine.verify([])
    with pytest.raises(ValueError, match=r"drafts: expected at most 1 \(num_spec, at least 1\), got \[2\]"):
        engine.verify([[1, 2]])
    with pytest.raises(ValueError, match=r"steps: expected at most 200 tokens of a sequence \(max_seq_len\)"):
        engine.decode(199)
    for call, message in {
        lambda: engine.decode(-1): "steps: expected at least 0, got -1",
        lambda: engine.decode(True): "steps: expected an int, got bool",
        lambda: engine.decode(2, forced=[[1]]): r"forced: expected 1 rows of 2 tokens, .*, got rows of \[1\] tokens",
        lambda: engine.decode(1, forced=[]): r"forced: expected 1 rows of 1 tokens, .*, got rows of \[\] tokens",
        lambda: engine.score([[1, 2]], []): "starts: expected 1 numbers, one for each sequence, got 0",
        lambda: engine.score([[1, 2]], [2]): r"starts\[0\]: expected 0 to 1, a token of the sequence, got 2",
        lambda: engine.score([[1, 2]], [-1]): r"starts\[0\]: expected at least 0, got -1",
        lambda: engine.score([[]], [0]): "sequences: expected 1 to 200 tokens each, got 0",
        lambda: engine.score([[1] * 201], [0]): "sequences: expected 1 to 200 tokens each, got 201",
    }.items():
        with pytest.raises((ValueError, TypeError), match=message):
            call()
    assert engine.streams[0].cached.num_tokens == 2


def test_proposers() -> None:
    assert ngram_drafts([1, 2, 3, 9, 1, 2, 3], 2) == [9, 1]
    assert ngram_drafts([5, 7, 5, 8, 5], 3) == [8, 5]
    assert ngram_drafts([1, 2, 3], 2) == [] and ngram_drafts([1], 2) == []
    assert len(random_drafts(random.Random(0), 10, 4)) == 4
    assert accept_greedily([4, 5, 6], [4, 5, 7, 8]) == [4, 5, 7]
    assert accept_greedily([4], [4, 9]) == [4, 9] and accept_greedily([], [3]) == [3]
