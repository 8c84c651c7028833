"""Modules of SGLang's names with as little in them as the adapter touches; the host's own files where its package is there."""

import functools
import importlib.util
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gdn.integrations import installed
from gdn.integrations._hosts import SGLANG_CONVOLUTIONS
from tests.integrations import stand_in

LINEAR = "sglang.srt.layers.attention.linear"
BACKEND, ATTENTION = f"{LINEAR}.gdn_backend", "sglang.srt.layers.attention.hybrid_linear_attn_backend"
REGISTRY, BASE = "sglang.srt.plugins.hook_registry", f"{LINEAR}.kernels.kernel_backend"


class LinearAttnKernelBase:
    uses_state_checkpoints = supports_track_state_snapshot = supports_strided_target_verify_qkv = False

    def decode(self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, **kwargs):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    def extend(self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, **kwargs):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    def target_verify(self, A_log, dt_bias, q, k, v, a, b, *, ssm_states, cache_indices, query_start_loc, **kwargs):  # type: ignore[no-untyped-def]
        raise NotImplementedError


class HookType(Enum):
    AFTER = "after"
    AROUND = "around"


class HookRegistry:
    hooks: dict[str, list[Any]] = {}
    patched: set[str] = set()

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: Any = HookType.AFTER, *, source: Any = None) -> None:
        assert hook_type is HookType.AROUND
        cls.hooks.setdefault(target, []).append(hook)

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hooks in cls.hooks.items():
            if target not in cls.patched:
                cls.patched.add(target)
                path, name = target.rsplit(".", 1)
                module, owner = path.rsplit(".", 1)
                holder = getattr(sys.modules[module], owner)
                for hook in hooks:
                    setattr(holder, name, _around(getattr(holder, name), hook))

    @classmethod
    def reset(cls) -> None:
        cls.hooks.clear()
        cls.patched.clear()


def _around(original: Any, hook: Any) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return wrapper


class LinearAttnKernelBackend(Enum):
    TRITON = "triton"
    FLASHINFER = "flashinfer"
    CUSTOM = "custom"

    @classmethod
    def _missing_(cls, value: object) -> "LinearAttnKernelBackend":
        return cls.CUSTOM

    def is_custom(self) -> bool:
        return self is LinearAttnKernelBackend.CUSTOM


class HostKernel:
    """The host's own kernel object: it remembers its calls."""

    def __init__(self, name: str = "triton", result: Any = "host") -> None:
        self.name, self.result, self.calls = name, result, []  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> Any:
        if name not in ("decode", "packed_decode", "extend", "target_verify"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return self.result

        return call


class GDNKernelDispatcher:
    def __init__(self, decode_backend, prefill_backend, verify_backend=None):  # type: ignore[no-untyped-def]
        for backend in (decode_backend, prefill_backend, verify_backend):
            if backend is LinearAttnKernelBackend.CUSTOM:
                raise ValueError(f"Unsupported GDN backend: {backend}")
        self.decode_kernel = HostKernel(decode_backend.value)
        self.extend_kernel = HostKernel(prefill_backend.value)
        self.verify_kernel = self.tree_verify_kernel = HostKernel()
        self.verify_kernel_is_flashinfer, self.supports_packed_decode = False, False

    def packed_decode(self, mixed_qkv, a, b, *, A_log, dt_bias, scale, ssm_states, cache_indices, num_v_heads, head_v_dim, **kwargs):  # type: ignore[no-untyped-def] # fmt: skip # noqa: E501
        raise NotImplementedError

    decode, extend, target_verify = (vars(LinearAttnKernelBase)[name] for name in ("decode", "extend", "target_verify"))


class MambaAttnBackendBase:
    def _track_mamba_state_decode(self, forward_batch, conv_states, ssm_states, cache_indices, layer_id=None):  # type: ignore[no-untyped-def]
        self.tracked = (forward_batch, conv_states, ssm_states, cache_indices, layer_id)


class GDNAttnBackend(MambaAttnBackendBase):
    requires_contiguous_prefill_state = True

    def __init__(self, model_runner):  # type: ignore[no-untyped-def]
        self.kernel_dispatcher, self.enable_mis = dispatch(), enable_mis
        self.req_to_token_pool = model_runner.req_to_token_pool

    def forward_decode(self, layer, forward_batch, mixed_qkv, a, b, **kwargs):  # type: ignore[no-untyped-def]
        return (stand_in.HOST, layer, forward_batch, mixed_qkv, a, b, kwargs)


class HybridReqToTokenPool:
    def mamba2_layer_cache(self, layer_id):  # type: ignore[no-untyped-def]
        return self.layer_cache  # type: ignore[attr-defined]


class RadixLinearAttention:
    def __init__(self) -> None:
        self.A_log = self.activation = self.bias = self.conv_weights = self.dt_bias = self.layer_id = self.v_dim = None
        self.head_k_dim = self.head_q_dim = self.head_v_dim = self.num_k_heads = self.num_q_heads = self.num_v_heads = 0


class ModelRunner:
    def __init__(self) -> None:
        self.model = self.dtype = self.req_to_token_pool = None


enable_mis = False  # multi-item scoring
mamba = SimpleNamespace()  # the linear attention switches of the command line
deterministic = SimpleNamespace(enable_deterministic_inference=False)


def get_exec() -> Any:
    return SimpleNamespace(mamba=mamba, deterministic=deterministic)


def choose(base: str = "gdn", **phases: str | None) -> None:
    """What the command line of the engine said: --linear-attn-backend, and those of its phases."""
    mamba.linear_attn_backend = base
    for phase in ("decode", "prefill", "verify"):
        setattr(mamba, f"linear_attn_{phase}_backend", phases.get(phase))


def dispatch() -> Any:
    """A dispatcher as the engine makes it from its command line."""
    base = mamba.linear_attn_backend
    names = [mamba.linear_attn_decode_backend or base, mamba.linear_attn_prefill_backend or base]
    names.append(mamba.linear_attn_verify_backend or "triton")
    return sys.modules[f"{LINEAR}.gdn_backend"].GDNKernelDispatcher(*map(LinearAttnKernelBackend, names))


def host_file(name: str) -> ModuleType | None:
    """A module of the installed host, loaded from its file alone; None where the host is not there."""
    folder = installed.package_folder("sglang")
    found = installed.locate(folder, name) if folder is not None else None
    if found is None or found[1]:
        return None
    spec = importlib.util.spec_from_file_location(name, found[0])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Puts the modules where SGLang's are imported from; returns the choices of the command line.

    The switch that `enable` sets is taken back."""
    monkeypatch.setenv("GDN_SGLANG", "0")
    monkeypatch.delenv("GDN_SGLANG")
    registry, base = host_file(REGISTRY), host_file(BASE)
    choices = ["triton", "flashinfer"]
    methods: dict[type, tuple[str, ...]] = {
        GDNKernelDispatcher: ("__init__", "decode", "packed_decode", "extend", "target_verify"),
        GDNAttnBackend: ("__init__", "forward_decode"),
    }
    for owner, held in methods.items():
        for method in held:  # whatever a test puts there goes at its end
            monkeypatch.setattr(owner, method, vars(owner)[method])
    convolutions = {place: stand_in.function("sglang", name) for place, name in SGLANG_CONVOLUTIONS.items()}
    definitions = {place: name.rpartition(".") for place, name in SGLANG_CONVOLUTIONS.items()}
    names: dict[str, dict[str, Any]] = {
        BACKEND: {"GDNKernelDispatcher": GDNKernelDispatcher, "get_exec": get_exec, "GDNAttnBackend": GDNAttnBackend,
                  "LinearAttnKernelBackend": LinearAttnKernelBackend,
                  **{place.rpartition(".")[2]: function for place, function in convolutions.items()}},
        ATTENTION: {"MambaAttnBackendBase": MambaAttnBackendBase},
        "sglang.srt.mem_cache.memory_pool": {"HybridReqToTokenPool": HybridReqToTokenPool},
        "sglang.srt.model_executor.model_runner": {"ModelRunner": ModelRunner},
        "sglang.srt.layers.radix_linear_attention": {"RadixLinearAttention": RadixLinearAttention},
        **{module: {name: convolutions[place]} for place, (module, _, name) in definitions.items()},
        BASE: {"LinearAttnKernelBase": base.LinearAttnKernelBase if base else LinearAttnKernelBase},
        REGISTRY: {"HookRegistry": registry.HookRegistry if registry else HookRegistry,
                   "HookType": registry.HookType if registry else HookType},
        "sglang.srt.server_args": {"LINEAR_ATTN_KERNEL_BACKEND_CHOICES": choices},
        "sglang.srt.runtime_context": {"get_exec": get_exec},
    }  # fmt: skip
    stand_in.put(monkeypatch, names)
    HookRegistry.reset()
    choose()
    deterministic.enable_deterministic_inference = False
    return choices
