"""Every switch: its default, the values that it takes, what it refuses; and names that are nobody's."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from gdn.runtime import env, log, registry

BACKENDS = {"auto": "auto", "tilelang": "tilelang", "cute": "cute", "reference": "reference"}
ATTENTION = {**BACKENDS, "triton": "tilelang", "pai-fa3": "cute", "fa2": "auto", "fa3": "auto"}
BOOLS = {"1": True, "0": False, "true": True, "False": False, "YES": True, "no": False, "on": True, "off": False}
INTS = {"1": 1, "4096": 4096}

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
    "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": (256, INTS),
    "GDN_BACKEND": ("auto", BACKENDS),
    "GDN_TUNED_DIR": (None, {"/tables": Path("/tables")}),
    "GDN_CACHE_DIR": (None, {"/cache": Path("/cache")}),
    "GDN_TUNED": ("auto", {"auto": "auto", "strict": "strict", "OFF": "off"}),
    "GDN_BATCH_INVARIANT": (False, BOOLS),
    "GDN_VALIDATE": (False, BOOLS),
    "GDN_LOG": ("off", {"off": "off", "info": "info", "Debug": "debug"}),
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


def test_zero_mebibytes_are_refused():
    with pytest.raises(ValueError, match="integer >= 1"):
        env.parse({"VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": "0"})


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


def test_nothing_else_reads_the_environment():
    root = Path(env.__file__).parents[2]
    reads = re.compile(r"os\.(environ|getenv)|\bgetenv\(|\bimport environ\b|environ\[")
    sources = [path for package in ("gdn", "autotune") for path in (root / package).rglob("*.py")]
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
