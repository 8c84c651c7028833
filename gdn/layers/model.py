"""A hybrid model: embedding, decoder layers, norm and head."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from gdn.layers.caches import HybridCaches
from gdn.layers.config import HybridConfig
from gdn.layers.decoder_layer import DecoderLayer
from gdn.layers.hyper import HyperConnection
from gdn.layers.norm import RMSNorm
from gdn.layers.parallel import ContextParallel, TensorParallel
from gdn.layers.rotary import RotaryEmbedding
from gdn.layers.step import StepMetadata


class HybridModel(nn.Module):
    """Language model of Gated DeltaNet and full attention layers, for inference on packed tokens and paged caches.

    Parameters are not initialised: `gdn.layers.loading` fills them from Transformers' tensors.

    Parameters
    ----------
    config : HybridConfig
        Sizes of the whole model. Without a group, what this process holds: one rank's (`HybridConfig.per_rank`) are served too,
        with outputs of layers that are summands.
    null_slot : int
        Largest index of a state slot that means padding (vLLM's convention is 0).
    tp_group : torch.distributed.ProcessGroup, optional
        Tensor-parallel ranks, which divide the layers; all ranks run the same steps. None = one rank.
    cp_group : torch.distributed.ProcessGroup, optional
        Context-parallel ranks, which part the rows of steps with prompts, where the metadata says so; all ranks run the same
        steps, each on its own caches, and get the whole output. The caches are equal, but for the last bits of what decode rows
        leave in steps with prompts: a rank computes these in products with its own rows. None = one rank.
    device, dtype : torch.device, torch.dtype
        Device and dtype of the parameters. The decay parameters of Gated DeltaNet and the rotary table stay float32.

    Attributes
    ----------
    config : HybridConfig
        Sizes of this rank, which its caches take.
    embed_tokens, lm_head : Parameter [vocab, hidden]
        Embedding and head, whole on every rank; with `tie_word_embeddings` the embedding is the head, and there is no `lm_head`,
        until `gdn.layers.loading.load` finds another head in a checkpoint.
    layers : ModuleList of DecoderLayer
    norm or hyper_connection_mixer : RMSNorm or HyperConnection
        What is before the head, with residual "plain" or "hyper".

    Raises
    ------
    TypeError, ValueError
        Where `tp_group` or `cp_group` is no group, or the size of `tp_group` does not divide a number of heads or a width.

    Notes
    -----
    The embedding and the head are whole on every rank. Divided by rows of the vocabulary they would need a sum after the
    embedding and a gather of the logits, 19 MB for 64 rows of 151936, and save three quarters of the head's time on four ranks:
    of the about 200 microseconds that reading its 622 MB takes, once in a step of 48 layers. The price is the memory of both.
    """

    def __init__(
        self,
        config: HybridConfig,
        *,
        null_slot: int = -1,
        tp_group: dist.ProcessGroup | None = None,
        cp_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.tensor_parallel, self.context_parallel = TensorParallel(tp_group), ContextParallel(cp_group)
        self.config = self.tensor_parallel.share(config)
        placed: dict[str, Any] = {"device": device, "dtype": dtype}

        def table() -> nn.Parameter:
            return nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, **placed), requires_grad=False)

        self.rotary = RotaryEmbedding(config, device=device)
        self.embed_tokens = table()
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, self.rotary, null_slot=null_slot, tp_group=tp_group, cp_group=cp_group, **placed)
            for layer in range(config.num_hidden_layers)
        )
        if config.residual == "hyper":
            self.hyper_connection_mixer = HyperConnection(config, injects=False, **placed)
        else:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **placed)
        if not config.tie_word_embeddings:
            self.lm_head = table()

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepMetadata, caches: HybridCaches) -> Tensor:
        """Runs one step.

        Parameters
        ----------
        input_ids, positions : Tensor [tokens], Tensor [tokens] of int64
            Tokens of all sequences, packed, and their positions. Rows of padding hold any valid token and position.
        step, caches : StepMetadata, HybridCaches
            Sequences of the step, and the caches of all layers, updated in place.

        Returns
        -------
        Tensor [tokens, hidden]
            Input of the head.

        Raises
        ------
        TypeError, ValueError
            Named after the argument: input_ids that are not packed, positions that are not one per token, sequences that may be
            longer than the rotary table (`max_seq_len` of the metadata). Nothing is written then. The three rows of mrope that
            images need are not served. (For text, mrope is the plain rotary embedding, since its three positions are equal.)
        """
        if input_ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"input_ids: expected dtype int32 or int64, got {input_ids.dtype}")
        if input_ids.dim() != 1:
            raise ValueError(f"input_ids: expected shape [tokens], packed, got shape {list(input_ids.shape)}")
        if positions.shape != input_ids.shape:
            expected = f"shape {list(input_ids.shape)}, one position per token (image positions are not served)"
            raise ValueError(f"positions: expected {expected}, got shape {list(positions.shape)}")
        parts = self.context_parallel.parts(step.gdn, "input_ids", input_ids, own=False)
        if self.config.num_full_layers:
            with self.context_parallel.refusing(input_ids):
                self.rotary.check_length(step.attention.max_seq_len)
        hidden_states = embedding(self.context_parallel.own(input_ids, parts), self.embed_tokens)
        residual: Tensor | None = None
        caches.gdn.begin_step(step.gdn)
        is_hyper = self.config.residual == "hyper"
        if is_hyper:
            hidden_states = self.hyper_connection_mixer.split(hidden_states)
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual, positions, step, caches)
        if is_hyper:
            output: Tensor = self.hyper_connection_mixer(hidden_states)[0]
        else:
            output = self.norm.add(hidden_states, residual)[0]
        return self.context_parallel.whole(output, parts, input_ids.shape[0])

    if TYPE_CHECKING:
        __call__ = forward

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits [rows, vocab] of rows of hidden states [rows, hidden] that the caller selected."""
        return linear(hidden_states, self.lm_head if hasattr(self, "lm_head") else self.embed_tokens)

    def greedy_tokens(self, logits: Tensor) -> Tensor:
        """Most likely tokens [rows] of logits [rows, vocab], the first rank's on every rank.

        The ranks' logits are the same bits where all have the same GPU and libraries, and a sum over ranks is the same on each.
        Ranks that chose differently all the same would go on with batches of different shapes, and wait for each other.
        """
        return self.context_parallel.agree(self.tensor_parallel.agree(logits.argmax(dim=-1)))
