"""Environment switches: declared, typed and documented here, and read nowhere else.

Switches are read at the first `current()` and again after `reload()`. Values are case-insensitive; an empty value counts
as unset. An invalid value raises ValueError with the valid ones. An unknown name with one of this project's prefixes warns
once, with the nearest known name. A switch that is set but not read by this version warns once (`no_effect`).
"""

import difflib
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gdn.runtime import log, registry

PREFIXES = ("VLLM_GDN_", "VLLM_QSA_", "VLLM_DSA_", "GDN_")

# Names that the serving stack, or builds of it, read themselves: ignored here.
SERVING_STACK_NAMES = frozenset((
    "VLLM_GDN_DECODE_KERNEL", "VLLM_GDN_PREFILL_BACKEND", "VLLM_QSA_EXACT_TOPK", "VLLM_QSA_PREFILL_CP_USE_SPARSE_GATHER",
    "VLLM_QSA_PREFILL_ONLY_INDEXER_USE_CP",
))  # fmt: skip

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_BACKEND_VALUES = MappingProxyType({name: name for name in ("auto", *registry.BACKENDS)})
_ATTENTION = MappingProxyType({**_BACKEND_VALUES, "triton": "tilelang", "pai-fa3": "cute", "fa2": "auto", "fa3": "auto"})


@dataclass(frozen=True)
class Declaration:
    """One switch. kind: "bool", "int", "path" or "choice" (values: accepted word -> meaning)."""

    name: str
    kind: str
    default: Any
    effect: str
    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def accepted(self) -> str:
        """Valid values, in words."""
        of_kind = {"bool": "1, 0, true, false, yes, no, on, off", "int": "an integer >= 0", "path": "a path"}
        return of_kind.get(self.kind) or ", ".join(self.values)

    def parse(self, text: str) -> Any:
        """Returns the typed value; ValueError where the text is invalid."""
        word = text.strip().lower()
        if self.kind == "bool" and word in _TRUE + _FALSE:
            return word in _TRUE
        if self.kind == "int" and re.fullmatch(r"[+-]?\d+(_\d+)*", word) and int(word) >= 0:
            return int(word)
        if self.kind == "choice" and word in self.values:
            return self.values[word]
        if self.kind == "path":
            return self._path(text)
        raise ValueError(f"{self.name}: expected {self.accepted}, got {text!r}")

    def _path(self, text: str) -> Path:
        try:
            return Path(text.strip()).expanduser()
        except RuntimeError as error:  # a user without a home folder, or an unknown one in ~name
            expected = "a path, without ~ where the user has no home folder"
            raise ValueError(f"{self.name}: expected {expected}, got {text!r}") from error


def _switch(name: str, kind: str, default: Any, effect: str, values: Mapping[str, str] | None = None) -> Any:
    declaration = Declaration(name, kind, default, effect, values or {})
    return field(default=default, metadata={"declaration": declaration})


def _attention(phase: str) -> str:
    return f"sparse attention of {phase}: preferred backend (triton = tilelang, pai-fa3 = cute, fa2 and fa3 = auto)"


def _words(*words: str) -> dict[str, str]:
    return {word: word for word in words}


_ON = {**dict.fromkeys(_TRUE, "1"), **dict.fromkeys(_FALSE, "0"), "strict": "strict"}


@dataclass(frozen=True)
class Switches:
    """Values of all switches. None (or "auto") means that a switch has no influence."""

    gdn_use_bladnn: bool | None = _switch(
        "VLLM_GDN_USE_BLADNN", "bool", None,
        "chunk and recurrent GDN operators: 1 prefers CuTe, 0 TileLang; unset: whichever is tuned fastest",
    )  # fmt: skip
    qsa_use_fp8_indexer: bool = _switch(
        "VLLM_QSA_USE_FP8_INDEXER", "bool", False, "indexer cache and logits: 1 in FP8, 0 in bf16"
    )
    qsa_prefill_use_tl_indexer: bool | None = _switch(
        "VLLM_QSA_PREFILL_USE_TL_INDEXER", "bool", None, "prefill logits: 1 prefers TileLang, 0 CuTe; unset: tuned fastest"
    )
    qsa_decode_use_tl_indexer: bool | None = _switch(
        "VLLM_QSA_DECODE_USE_TL_INDEXER", "bool", None, "paged decode logits: 1 prefers TileLang, 0 CuTe; unset: tuned fastest"
    )
    qsa_prefill_attn_backend: str = _switch("VLLM_QSA_PREFILL_ATTN_BACKEND", "choice", "auto", _attention("prefill"), _ATTENTION)
    qsa_decode_attn_backend: str = _switch("VLLM_QSA_DECODE_ATTN_BACKEND", "choice", "auto", _attention("decode"), _ATTENTION)
    qsa_prefill_use_cp: bool = _switch(
        "VLLM_QSA_PREFILL_USE_CP", "bool", False, "context parallel for QSA prefill, where a process group is given"
    )
    dsa_context_parallel_threshold: int = _switch(
        "VLLM_DSA_USE_CONTEXT_PARALLEL_THRESHOLD", "int", 16384, "tokens: sequences longer than this go context parallel"
    )
    dsa_dense_prefill_threshold: int = _switch(
        "VLLM_DSA_USE_DENSE_PREFILL_THRESHOLD", "int", 2048,
        "tokens: in prefill, sequences (context + new) shorter than this and than the top-k attend densely",
    )  # fmt: skip
    sparse_indexer_max_logits_mb: int = _switch(
        "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", "int", 512,
        "MiB: default workspace of indexer_topk and paged_indexer_topk; 0: the scores of one row at a time",
    )  # fmt: skip
    backend: str = _switch("GDN_BACKEND", "choice", "auto", "every operator: preferred backend", _BACKEND_VALUES)
    tuned_dir: Path | None = _switch(
        "GDN_TUNED_DIR", "path", None, "folder of tuned tables that are looked up before the shipped ones"
    )
    cache_dir: Path | None = _switch(
        "GDN_CACHE_DIR",
        "path",
        None,
        "folder of compiled kernels, for example one that `gdn compile` built; unset: the platform's user cache",
    )
    tuned: str = _switch(
        "GDN_TUNED", "choice", "auto",
        "tuned tables: auto uses an entry near enough, strict raises where there is none, off ignores them",
        _words("auto", "strict", "off"),
    )  # fmt: skip
    batch_invariant: bool = _switch(
        "GDN_BATCH_INVARIANT", "bool", False,
        "1: a sequence's result is the same bits whatever else is in the batch (tiles ignore token and batch counts)",
    )  # fmt: skip
    validate: bool = _switch(
        "GDN_VALIDATE", "bool", False,
        "1: values that live on the device (cu_seqlens, slots, block ids) are checked too, at the cost of a sync; "
        "on the CPU they always are",
    )  # fmt: skip
    compile: str = _switch(
        "GDN_COMPILE", "choice", "auto",
        "a kernel that is in no cache: auto compiles it, warn compiles it and says so, off raises and names the command that "
        "builds it",
        _words("auto", "warn", "off"),
    )  # fmt: skip
    replay: str = _switch(
        "GDN_REPLAY", "choice", "auto",
        "decode of Gated DeltaNet layers writes a state once in many tokens, and drafts take no slots of their own: 1 on, 0 off, "
        "auto where it is faster; read when a cache is made",
        _words("auto", "0", "1"),
    )  # fmt: skip
    log: str = _switch(
        "GDN_LOG", "choice", "off", "why a backend or tile was chosen, once per decision, on stderr",
        _words("off", "info", "debug"),
    )  # fmt: skip
    vllm: str = _switch(
        "GDN_VLLM", "choice", "0",
        "1: vLLM's Gated DeltaNet layers run on these kernels; strict: a layer that would be left to vLLM raises",
        _ON,
    )  # fmt: skip
    sglang: str = _switch(
        "GDN_SGLANG", "choice", "0",
        "1: SGLang offers these kernels as --linear-attn-backend gdn; strict: a call that would be left to SGLang raises",
        _ON,
    )  # fmt: skip
    # op -> GDN_BACKEND_<OP>, where set; left out of the hash, since a mapping has none, but not of equality
    backend_of: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    given: frozenset[str] = frozenset()  # names of the variables that were set

    def value(self, name: str) -> Any:
        """Value of the variable of this name."""
        if name in _OP_BY_SWITCH:
            return self.backend_of.get(_OP_BY_SWITCH[name], "auto")
        return getattr(self, _FIELD_BY_SWITCH[name])


_OP_BY_SWITCH: dict[str, str] = {}  # filled by `declare`
_FIELD_BY_SWITCH: dict[str, str] = {f.metadata["declaration"].name: f.name for f in fields(Switches) if f.metadata}

# All switches by name, in the order of `gdn env`.
DECLARATIONS: dict[str, Declaration] = {
    f.metadata["declaration"].name: f.metadata["declaration"] for f in fields(Switches) if f.metadata
}


def declare(operators: Iterable[registry.Operator]) -> None:
    """Declares the switches that order a backend for one operator, after all others."""
    for one in operators:
        _OP_BY_SWITCH[one.switch] = one.name
        text = f"{one.name}: required backend"
        DECLARATIONS[one.switch] = Declaration(one.switch, "choice", "auto", text, _BACKEND_VALUES)


def no_effect(name: str) -> str | None:
    """Reason why a switch has no effect yet; None where it has an effect."""
    operators = [op for op in registry.OPERATORS.values() if any(one.switch == name for one in op.preferences)]
    if operators and not any(op.modules for op in operators):
        names = ", ".join(op.name for op in operators)
        return f"no effect yet: {names} has only the reference, so there is no kernel to choose"
    return None


def parse(environ: Mapping[str, str]) -> Switches:
    """Returns the switches of an environment; ValueError for an invalid value. Pure."""
    given = {name: environ[name] for name in DECLARATIONS if environ.get(name, "").strip()}
    values = {name: DECLARATIONS[name].parse(text) for name, text in given.items()}
    orders = {_OP_BY_SWITCH[name]: value for name, value in values.items() if name in _OP_BY_SWITCH}
    settings: dict[str, Any] = {_FIELD_BY_SWITCH[name]: value for name, value in values.items() if name in _FIELD_BY_SWITCH}
    return Switches(**settings, backend_of=MappingProxyType(orders), given=frozenset(given))


def toolkit_home() -> Path | None:
    """CUDA toolkit that CUDA_HOME (or CUDA_PATH) names. Not a switch of this project: the DSLs read it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return Path(home) if home else None


_current: Switches | None = None
_warned: set[str] = set()


def exported(name: str) -> str | None:
    """The text of a switch in the environment now, whatever `current` has read."""
    return os.environ.get(name)


def export(name: str, value: str | None) -> str | None:
    """Sets a switch in the environment, for processes that this one starts too; None removes it. Returns what it was."""
    before = os.environ.get(name)
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
    reload()
    return before


def current() -> Switches:
    """Switches of this process, read once."""
    return _current if _current is not None else reload()


def reload() -> Switches:
    """Reads the environment again. Decisions memoised under the former switches are dropped."""
    global _current
    _current = None  # if a value below is invalid, the next current() must raise again
    switches = parse(os.environ)
    known = [*DECLARATIONS, *SERVING_STACK_NAMES]
    for name in sorted(os.environ):
        if name.startswith(PREFIXES) and name not in known and name not in _warned:
            _warned.add(name)
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            warnings.warn(f"unknown environment switch {name}{hint} (`gdn env` lists all)", stacklevel=2)
    log.configure(switches.log)
    for name in sorted(switches.given - _warned):
        if reason := no_effect(name):
            _warned.add(name)
            log.LOGGER.warning(f"{name} is set and has {reason}")
    _current = switches
    return switches


def set_default(name: str, value: str) -> None:
    """Sets a variable that another library reads, where the environment has none."""
    os.environ.setdefault(name, value)
