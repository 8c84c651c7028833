"""Every switch: its default, the values that it takes, what it refuses; and names that are nobody's."""

import ast
import dataclasses
import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gdn
from gdn.runtime import env, log, registry

BACKENDS = {"auto": "auto", "tilelang": "tilelang", "cute": "cute", "reference": "reference"}
ATTENTION = {**BACKENDS, "triton": "tilelang", "pai-fa3": "cute", "fa2": "auto", "fa3": "auto"}
BOOLS = {"1": True, "0": False, "true": True, "False": False, "YES": True, "no": False, "on": True, "off": False}
INTS = {"0": 0, "1": 1, "4096": 4096}

# The table of the specification: name -> (default, accepted text -> value).
SPECIFIED = {
    "VLLM_GDN_USE_BLADNN": (None, BOOLS),
    "VLLM_QSA_USE_FP8_INDEXER": (False, BOOLS),
    "VLLM_QSA_PREFILL_USE_TL_INDEXER": (None, BOOLS),
    "VLLM_QSA_DECODE_USE_TL_INDEXER": (None, BOOLS),
    "VLLM_QSA_PREFILL_ATTN_BACKEND": ("auto", ATTENTION),
    "VLLM_QSA_DECODE_ATTN_BACKEND": ("auto", ATTENTION),
    "VLLM_QSA_PREFILL_USE_CP": (False, BOOLS),
    "VLLM_DSA_USE_CONTEXT_PARALLEL_THRESHOLD": (16384, INTS),
    "VLLM_DSA_USE_DENSE_PREFILL_THRESHOLD": (2048, INTS),
    "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": (512, INTS),
    "GDN_BACKEND": ("auto", BACKENDS),
    "GDN_TUNED_DIR": (None, {"/tables": Path("/tables")}),
    "GDN_CACHE_DIR": (None, {"/cache": Path("/cache")}),
    "GDN_COMPILE": ("auto", {"auto": "auto", "warn": "warn", "OFF": "off"}),
    "GDN_TUNED": ("auto", {"auto": "auto", "strict": "strict", "OFF": "off"}),
    "GDN_BATCH_INVARIANT": (False, BOOLS),
    "GDN_VALIDATE": (False, BOOLS),
    "GDN_REPLAY": ("auto", {"auto": "auto", "0": "0", "1": "1"}),
    "GDN_LOG": ("off", {"off": "off", "info": "info", "Debug": "debug"}),
    "GDN_VLLM": ("0", {"1": "1", "On": "1", "false": "0", "STRICT": "strict"}),
    "GDN_SGLANG": ("0", {"1": "1", "On": "1", "false": "0", "STRICT": "strict"}),
    **{f"GDN_BACKEND_{op.upper()}": ("auto", BACKENDS) for op in registry.OPERATORS},
}


def test_every_specified_switch_is_declared_and_no_other():
    assert set(env.DECLARATIONS) == set(SPECIFIED)
    assert all(declaration.effect and declaration.accepted for declaration in env.DECLARATIONS.values())


@pytest.mark.parametrize("name", SPECIFIED)
def test_defaults_and_values(name: str):
    default, accepted = SPECIFIED[name]
    assert env.parse({}).value(name) == default
    assert env.parse({name: " "}).value(name) == default  # empty counts as unset
    assert env.parse({}).given == frozenset()
    for text, value in accepted.items():
        switches = env.parse({name: text})
        assert switches.value(name) == value and type(switches.value(name)) is type(value)
        assert switches.given == {name}
    others = set(SPECIFIED) - {name}
    assert all(switches.value(other) == SPECIFIED[other][0] for other in others)


@pytest.mark.parametrize("name", [name for name in SPECIFIED if not name.endswith("_DIR")])
@pytest.mark.parametrize("text", ["maybe", "-1", "1.5", "triton2"])
def test_a_value_that_is_not_understood_lists_the_valid_ones(name: str, text: str):
    with pytest.raises(ValueError) as caught:
        env.parse({name: text})
    message = str(caught.value)
    assert message.startswith(f"{name}: expected ") and repr(text) in message
    words = {"GDN_LOG": "off, info, debug", "GDN_BACKEND": "auto, tilelang, cute, reference"}
    assert words.get(name, "") in message


@pytest.mark.parametrize("value", ["0", "1", "512"])
def test_no_workspace_of_the_indexer_disturbs_other_operators(switch: Callable[..., env.Switches], value: str):
    """0 is vLLM's word for one row of scores at a time."""
    switch(VLLM_SPARSE_INDEXER_MAX_LOGITS_MB=value)
    assert env.current().sparse_indexer_max_logits_mb == int(value)
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    assert gdn.rms_norm_gated(x, x, torch.ones(64)).shape == x.shape
    assert gdn.topk_indices(torch.ones(2, 9), 2).tolist() == [[0, 1]] * 2


@pytest.mark.parametrize("paged", [False, True], ids=["ragged", "paged"])
def test_zero_mebibytes_select_what_others_select(switch: Callable[..., env.Switches], paged: bool):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    rows, keys = 6, 32
    q, k, weights = normal(rows, 2, 64), normal(keys, 64), normal(rows, 2)
    starts, ends = torch.zeros(rows, dtype=torch.int32), torch.arange(rows, dtype=torch.int32) + keys - rows + 1
    tables = torch.arange(2, dtype=torch.int32).expand(rows, 2).contiguous()

    def selected() -> torch.Tensor:
        if paged:
            return gdn.paged_indexer_topk(q[:, None], k.view(2, 16, 64), weights, ends, tables, 5)
        return gdn.indexer_topk(q, k, weights, starts, ends, 5)

    expected = selected()
    switch(VLLM_SPARSE_INDEXER_MAX_LOGITS_MB="0")
    assert torch.equal(selected(), expected) and (expected >= 0).all()


def test_current_reads_once_and_reload_reads_again(monkeypatch: pytest.MonkeyPatch):
    first = env.current()
    monkeypatch.setenv("GDN_BACKEND", "cute")
    assert env.current() is first and first.backend == "auto"
    assert env.reload().backend == "cute"
    assert env.current().backend == "cute"


def test_a_bad_value_is_refused_again_until_it_is_mended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GDN_TUNED", "sometimes")
    for read in (env.reload, env.current, env.current):
        with pytest.raises(ValueError, match="GDN_TUNED: expected auto, strict, off"):
            read()
    monkeypatch.setenv("GDN_TUNED", "off")
    assert env.current().tuned == "off"


def test_switches_are_frozen_and_hashable():
    switches = env.parse({"GDN_BACKEND_CHUNK": "cute"})
    with pytest.raises(AttributeError):
        switches.backend = "cute"  # type: ignore[misc]
    with pytest.raises(TypeError):
        switches.backend_of["chunk"] = "tilelang"  # type: ignore[index]
    assert hash(switches) == hash(env.parse({"GDN_BACKEND_CHUNK": "cute"}))
    assert switches != env.parse({"GDN_BACKEND_CHUNK": "tilelang"})


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("GDN_BACKEND_CHUNKS", "GDN_BACKEND_CHUNK"),
        ("GDN_TUNE_DIR", "GDN_TUNED_DIR"),
        ("VLLM_GDN_USE_BLADN", "VLLM_GDN_USE_BLADNN"),
        ("VLLM_QSA_USE_FP8_INDEXR", "VLLM_QSA_USE_FP8_INDEXER"),
        ("VLLM_DSA_USE_DENSE_PREFILL_TRESHOLD", "VLLM_DSA_USE_DENSE_PREFILL_THRESHOLD"),
    ],
)
def test_a_mistyped_name_warns_once_with_the_nearest(monkeypatch: pytest.MonkeyPatch, typo: str, meant: str):
    monkeypatch.setattr(env, "_warned", set())
    monkeypatch.setenv(typo, "1")
    with pytest.warns(UserWarning, match=f"{typo}; did you mean {meant}\\?"):
        env.reload()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.reload()


def test_an_unlikely_name_warns_without_a_suggestion(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(env, "_warned", set())
    monkeypatch.setenv("GDN_QQQQQQQQQQQQQQQQQQQQQQQQQ", "1")
    with pytest.warns(UserWarning) as caught:
        env.reload()
    assert "did you mean" not in str(caught[0].message)


@pytest.mark.parametrize("name", [*sorted(env.SERVING_STACK_NAMES), "VLLM_LOGGING_LEVEL", "OTHER_GDN_BACKEND"])
def test_names_of_others_pass_in_silence(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setenv(name, "whatever")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.reload()


ROOT = Path(env.__file__).parents[2]
SERVING = [name for name in env.DECLARATIONS if name.startswith("VLLM_")]
# The serving stack's switches must act on what runs; a command that only prints them is no reader of those.
OPERATORS_AND_LAYERS = ("gdn/ops", "gdn/core", "gdn/runtime", "gdn/layers", "gdn/distributed", "gdn/integrations")


def test_the_serving_stacks_names():
    assert len(SERVING) == 10


def _holds_switches(node: ast.expr) -> bool:
    """Whether an expression is the switches: env.current(), env.reload(), switches, self.switches, module.switches, ..."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr in ("current", "reload")
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.endswith("switches")


def readers() -> dict[str, set[str]]:
    """Field of Switches -> the files that read it as an attribute of the switches."""
    found: dict[str, set[str]] = {}
    for path in [path for package in ("gdn", "autotune", "benchmarks") for path in sorted((ROOT / package).rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _holds_switches(node.value):
                found.setdefault(node.attr, set()).add(path.relative_to(ROOT).as_posix())
    return found


READERS = readers()


def acts(name: str) -> bool:
    """Whether a switch decides anything: code reads it, or it is a preference among kernels that an operator has."""
    if any(op.modules for op in registry.OPERATORS.values() for one in op.preferences if one.switch == name):
        return True
    if name in env._OP_BY_SWITCH:
        return bool(READERS.get("backend_of"))
    files = READERS.get(env._FIELD_BY_SWITCH[name], set())
    return any(not name.startswith("VLLM_") or file.startswith(OPERATORS_AND_LAYERS) for file in files)


@pytest.mark.parametrize("name", env.DECLARATIONS)
def test_a_switch_has_a_reader_or_says_that_it_has_none(name: str):
    """The change that adds the reader removes the note."""
    assert acts(name) == (env.no_effect(name) is None)


def test_readers_are_found_where_they_are():
    """The test above would otherwise pass for the wrong reason."""
    assert "gdn/ops/indexer/indexer_topk.py" in READERS["sparse_indexer_max_logits_mb"]
    assert "gdn/runtime/compiled.py" in READERS["cache_dir"] and "gdn/runtime/env.py" in READERS["log"]
    assert set(READERS) <= set(env._FIELD_BY_SWITCH.values()) | {"backend_of", "given", "value"}


def _without_kernels(monkeypatch: pytest.MonkeyPatch) -> str:
    """Leaves an operator only its reference; returns the switch that would choose among its kernels."""
    name = "sparse_attention_prefill"
    monkeypatch.setitem(registry.OPERATORS, name, dataclasses.replace(registry.OPERATORS[name], modules={}))
    return "VLLM_QSA_PREFILL_ATTN_BACKEND"


def test_a_switch_without_effect_warns_once_when_set(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    name = _without_kernels(monkeypatch)
    monkeypatch.setattr(env, "_warned", set())
    monkeypatch.setenv(name, "cute")
    env.reload()
    env.reload()
    (record,) = [record for record in caplog.records if name in record.getMessage()]
    assert (record.name, record.levelno) == ("gdn", logging.WARNING)
    assert record.getMessage().startswith(f"{name} is set and has no effect yet: sparse_attention_prefill has only the reference")


def test_switches_with_an_effect_do_not_warn(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path):
    monkeypatch.setattr(env, "_warned", set())
    values = {"bool": "1", "int": "7", "path": str(tmp_path)}
    for name, declaration in env.DECLARATIONS.items():
        monkeypatch.setenv(name, values.get(declaration.kind) or next(iter(declaration.values)))
    env.reload()
    assert not caplog.records


def test_a_switch_ceases_to_warn_with_the_operators_first_kernel(monkeypatch: pytest.MonkeyPatch):
    name = "sparse_attention_prefill"
    for modules, has_effect in (({}, False), ({"cute": "kernels_cute.attention.prefill"}, True)):
        monkeypatch.setitem(registry.OPERATORS, name, dataclasses.replace(registry.OPERATORS[name], modules=modules))
        assert (env.no_effect("VLLM_QSA_PREFILL_ATTN_BACKEND") is None) == has_effect


def test_the_documentation_lists_every_switch():
    text = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    section = text.partition("## Switches")[2].partition("\n## ")[0]
    rows = {row: re.findall(r"`((?:GDN|VLLM)_[A-Z0-9_]*[A-Z0-9])`", row) for row in section.splitlines() if row.startswith("|")}
    of_operators = {operator.switch for operator in registry.OPERATORS.values()}
    assert sorted(name for names in rows.values() for name in names) == sorted(set(env.DECLARATIONS) - of_operators)
    assert "`GDN_BACKEND_<OP>`" in section
    for row, names in rows.items():
        assert all(("no effect yet" in row) == (env.no_effect(name) is not None) for name in names), row


def test_nothing_else_reads_the_environment():
    root = Path(env.__file__).parents[2]
    reads = re.compile(r"os\.(environ|getenv)|\bgetenv\(|\bimport environ\b|environ\[")
    sources = [path for package in ("gdn", "autotune", "benchmarks") for path in (root / package).rglob("*.py")]
    guilty = [str(path) for path in sources if path != Path(env.__file__) and reads.search(path.read_text(encoding="utf-8"))]
    assert len(sources) > 20 and not guilty


@pytest.mark.parametrize(("mode", "lines"), [("off", 0), ("info", 1), ("debug", 2)])
def test_log_levels_write_to_stderr(
    switch: Callable[..., env.Switches], capsys: pytest.CaptureFixture[str], mode: str, lines: int
):
    switch(GDN_LOG=mode)
    log.once("told")
    log.once("told")
    log.debug("detail")
    out, error = capsys.readouterr()
    assert out == "" and len(error.splitlines()) == lines
    switch(GDN_LOG=mode)  # read again: told again
    log.once("told")
    assert ("told" in capsys.readouterr().err) == (mode != "off")
