"""Replacing points of a host, the version guard, reports, and putting everything back; on a host made for these tests."""

import logging
import re
import subprocess
import sys
import types
from typing import Any

import pytest

from gdn.integrations import Handle, _calls, _handle, _points, _records, _signatures, installed
from gdn.runtime import log, packages
from tests.integrations.conftest import KERNELS, FakeHost, host_module

PATH = "fakehost.kernels.double"


def refusal(x: Any, scale: Any = 2, *, bias: Any = None, allow_reference: bool = False) -> str | None:
    return "a bias" if bias is not None else None


def serve(x: Any, scale: Any = 2, *, bias: Any = None) -> Any:
    return ("gdn", x, scale, bias)


def point(**options: Any) -> _points.Point:
    return _points.attribute(PATH, refusal, serve, also=("fakehost.double",), **options)


def enable(fake: FakeHost, **options: Any) -> Handle:
    return _handle.enable(fake.host, [point()], **{"allow_reference": True, **options})


def test_a_replaced_function_serves_and_leaves_calls_and_counts_them(fake: FakeHost) -> None:
    with enable(fake) as handle:
        host = host_module()
        assert host.double(1) == host.kernels.double(1) == ("gdn", 1, 2, None)
        assert host.double(1, scale=3, bias=4) == ("host", 1, 3, 4)
        (report,) = handle.report().points
        assert (report.path, report.replaced, report.why, report.served, dict(report.left)) == (
            PATH,
            True,
            None,
            2,
            {"a bias": 1},
        )
        assert f"{PATH}: replaced, 2 calls served" in str(handle.report()) and "1 left to the host: a bias" in str(
            handle.report()
        )
    assert host.double(1) == host.kernels.double(1) == ("host", 1, 2, None)
    assert host.double.__name__ == "double" and not handle.enabled
    assert [(one.replaced, one.why) for one in handle.report().points] == [(False, "disabled")]


def test_the_host_may_be_imported_before_or_after(fake: FakeHost) -> None:
    assert "fakehost" not in sys.modules
    with enable(fake):
        assert host_module().double(1)[0] == "gdn"
    with enable(fake):  # it is imported by now
        assert host_module().double(1)[0] == "gdn"


def test_a_second_enable_with_the_same_options_is_the_same_handle(fake: FakeHost) -> None:
    with enable(fake) as handle:
        original = host_module().double
        assert enable(fake) is handle and host_module().double is original
        with pytest.raises(ValueError, match="enable: expected the options of the enabled handle.*got .*'strict': True"):
            enable(fake, strict=True)
    other = enable(fake)
    assert other is not handle
    other.disable()


def test_disable_twice_does_nothing_more(fake: FakeHost) -> None:
    handle = enable(fake)
    handle.disable()
    with enable(fake) as other:
        handle.disable()
        assert host_module().double(1)[0] == "gdn" and other.enabled


def test_a_patch_of_someone_else_on_top_is_left_alone_and_reported(fake: FakeHost) -> None:
    handle = enable(fake)
    host = host_module()
    ours = host.kernels.double
    host.kernels.double = foreign = lambda *args: ("foreign", ours(*args))
    handle.disable()
    assert host.kernels.double is foreign and host.double(1) == ("host", 1, 2, None)
    assert foreign(1) == ("foreign", ("host", 1, 2, None)), "what still reaches the replacement runs the host's own code"
    (report,) = handle.report().points
    assert not report.replaced and report.why == f"patched since by someone else, left alone: {PATH}"


def test_a_name_that_took_the_replacement_since_gets_the_original_back(fake: FakeHost) -> None:
    """As of a module that the host imported while the adapter was enabled."""
    host = host_module()
    original = host.kernels.double
    del host.double
    with enable(fake):
        host.double = host.kernels.double
        assert host.double(1)[0] == "gdn"
    assert host.double is host.kernels.double is original
    with enable(fake):
        assert host.double(1)[0] == host.kernels.double(1)[0] == "gdn"


def test_an_error_while_putting_back_leaves_no_handle_behind(fake: FakeHost) -> None:
    handle = enable(fake)

    def fail() -> None:
        raise RuntimeError("not put back")

    handle._installed[0].undo = fail
    with pytest.raises(RuntimeError, match="not put back"):
        handle.disable()
    assert not handle.enabled and handle not in _handle._enabled.values()
    host_module().kernels.double = host_module().double = host_module().kernels.double.__wrapped__


def test_a_re_export_that_is_another_object_stays(fake: FakeHost) -> None:
    host = host_module()
    host.double = other = lambda x: x
    with enable(fake):
        assert host.double is other and host.kernels.double(1)[0] == "gdn"


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        ("scale=2", "scale=3", "expected parameter scale=2, got scale=3"),
        ("scale=2", "factor=2", "expected parameter scale=2, got factor=2"),
        ("x, scale=2, *,", "x, scale=2, more=1, *,", r"expected parameter bias=None \(keyword\), got more=1"),
        ("*, bias=None", "*, bias=None, last", r"parameter last \(keyword\) is new"),
        (", *, bias=None", "", r"parameter bias=None \(keyword\) is gone"),
    ],
)
def test_another_signature_is_left_alone(
    fake: FakeHost, caplog: pytest.LogCaptureFixture, old: str, new: str, difference: str
) -> None:
    fake.rewrite(KERNELS.replace(old, new))
    log._told.clear()
    with caplog.at_level(logging.WARNING, "gdn"), enable(fake) as handle:
        assert host_module().double.__code__.co_name == "double", "the host's own"
        (report,) = handle.report().points
        assert not report.replaced and report.why is not None
        assert re.search(difference, report.why), report.why
        enable(fake)
    assert caplog.text.count("left alone") == 1
    with pytest.raises(RuntimeError, match=f"strict: {PATH}: .*{difference}"):
        enable(fake, strict=True)


def test_another_body_is_replaced_with_one_warning(fake: FakeHost, caplog: pytest.LogCaptureFixture) -> None:
    fake.rewrite(KERNELS.replace('return ("host", x, scale, bias)', "return None"))
    log._told.clear()
    for _ in range(2):
        with caplog.at_level(logging.WARNING, "gdn"), enable(fake, strict=True):
            assert host_module().double(1)[0] == "gdn"
    assert caplog.text.count("its body changed since it was tested (1.0)") == 1


def test_a_comment_far_away_is_no_other_body(fake: FakeHost, caplog: pytest.LogCaptureFixture) -> None:
    fake.rewrite("# another line\n\n" + KERNELS)
    with caplog.at_level(logging.WARNING, "gdn"), enable(fake, strict=True):
        assert host_module().double(1)[0] == "gdn"
    assert "body" not in caplog.text


def test_what_is_gone_or_not_importable_is_left_alone(fake: FakeHost) -> None:
    fake.rewrite("class Layer:\n    pass\n\n\ndef other():\n    pass\n")
    (fake.folder / "__init__.py").write_text("")
    with enable(fake) as handle:
        assert [one.why for one in handle.report().points] == [f"{PATH} is not there (tested: 1.0)"]
    fake.rewrite("import a_package_that_is_not_installed\n")
    with enable(fake) as handle:
        (why,) = [one.why for one in handle.report().points]
        assert why is not None and why.startswith(f"{PATH} cannot be imported: No module named 'a_package")


def test_what_is_not_recorded_is_left_alone(fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_records, "FOLDER", fake.folder)
    _records.load.cache_clear()
    with enable(fake) as handle:
        assert [one.why for one in handle.report().points] == [f"{PATH}: its signature is not recorded"]


@pytest.mark.parametrize(
    ("capabilities", "reason"),
    [([(10, 0), (8, 0)], "this machine has no SM90 GPU"), ([], "this machine has no GPU that the driver names")],
)
def test_another_gpu_touches_nothing(
    fake: FakeHost, monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]], reason: str
) -> None:
    monkeypatch.setattr(_calls, "_capabilities", lambda: capabilities)
    with enable(fake, allow_reference=False, strict=True) as handle:
        assert "fakehost" not in sys.modules, "not even imported"
        assert host_module().double(1)[0] == "host"
        assert [(one.replaced, one.why) for one in handle.report().points] == [(False, reason)]


def test_a_machine_with_an_sm90_gpu_among_others(fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_calls, "_capabilities", lambda: [(8, 0), (9, 0)])
    with enable(fake, allow_reference=False):
        assert host_module().double(1)[0] == "gdn"


@pytest.mark.parametrize("distribution", ["nvidia-cutlass-dsl", "apache-tvm-ffi"])
@pytest.mark.parametrize("version", ["99.0", None])
def test_without_kernels_nothing_is_replaced(
    fake: FakeHost, monkeypatch: pytest.MonkeyPatch, distribution: str, version: str | None
) -> None:
    """With a DSL of another version the operators would run their reference on the GPU: the host is faster by far."""
    monkeypatch.setattr(_calls, "_capabilities", lambda: [(9, 0)])
    found = packages.version
    monkeypatch.setattr(packages, "version", lambda one: version if one.distribution == distribution else found(one))
    with enable(fake, allow_reference=False) as handle:
        assert host_module().double(1)[0] == "host"
        (point,) = handle.report().points
        assert not point.replaced and str(point.why).startswith(f"requires {distribution} >=")
        assert str(point.why).endswith(f", got {version or 'none'}")
    with pytest.raises(RuntimeError, match=f"strict: nothing would be replaced, requires {distribution}"):
        enable(fake, allow_reference=False, strict=True)


def test_an_error_while_replacing_puts_everything_back(fake: FakeHost) -> None:
    def fail(calls: _calls.Calls) -> _points.Undo:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        _handle.enable(fake.host, [point(), _points.Point("fails", (PATH,), fail)], allow_reference=True)
    assert host_module().double(1)[0] == "host"


def test_a_method_of_a_class_and_the_attributes_of_the_class(fake: FakeHost) -> None:
    def unserved(self: Any, x: Any, allow_reference: bool = False) -> str | None:
        return None

    forward = _points.attribute("fakehost.kernels.Layer.forward", unserved, lambda self, x: ("gdn", x, self.weight))
    guarded = _points.Point(forward.path, (*forward.guards, "fakehost.kernels.Layer"), forward.install)
    with _handle.enable(fake.host, [guarded], allow_reference=True, strict=True):
        assert host_module().Layer().forward(5) == ("gdn", 5, 3)
    assert host_module().Layer().forward(5) == ("host", 5)
    fake.rewrite(KERNELS.replace("self.weight = 3", "self.kernel = 3"))
    with _handle.enable(fake.host, [guarded], allow_reference=True) as handle:
        (why,) = [one.why for one in handle.report().points]
        assert why == "fakehost.kernels.Layer: it lacks the recorded attributes weight (tested: 1.0)"


def test_scopes_have_handles_of_their_own(fake: FakeHost) -> None:
    with _handle.enable(fake.host, [], allow_reference=True, scope="a") as one:
        with _handle.enable(fake.host, [], allow_reference=True, scope="b", options={"level": 2}) as other:
            assert one is not other and other.options["level"] == 2


def test_reasons_that_are_counted_apart_are_bounded() -> None:
    calls = _calls.Calls()
    for number in range(_calls.MOST_REASONS + 5):
        assert not calls.serves(f"reason {number}")
    assert len(calls.left) == _calls.MOST_REASONS + 1 and calls.left["other reasons"] == 5


def test_installed_judges_files_without_importing(fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_records, "installed_version", lambda host: "1.1")
    found = installed.find(fake.host)
    assert (found.version, found.is_tested, found.has_adapter, "fakehost" in sys.modules) == ("1.1", False, False, False)
    assert set(found.names) == {PATH, "fakehost.kernels.Layer.forward", "fakehost.kernels.Layer"}
    assert set(found.names.values()) == {_records.Verdict()}
    (fake.folder / "kernels.py").rename(fake.folder / "gone.py")
    assert {one.refusal for one in installed.find(fake.host).names.values() if one} == set(), (
        "the package's own file tells nothing"
    )
    monkeypatch.setattr(_records, "installed_version", lambda host: None)
    assert installed.find(fake.host).version is None


def test_signatures_from_files_and_from_objects_are_the_same(fake: FakeHost) -> None:
    host = host_module()
    for name, value in ((PATH, host.double), ("fakehost.kernels.Layer.forward", host.Layer.forward)):
        entry = _records.load("fakehost")["1.0"][name]
        assert entry == {"parameters": _signatures.of_object(value), "source": _signatures.source_of_object(value)}
    assert isinstance(host, types.ModuleType)


def test_importing_an_adapter_imports_neither_its_host_nor_a_dsl() -> None:
    hosts = ("vllm", "sglang", "transformers", "fla", "flashinfer", "deep_gemm", "tilelang", "cutlass", "triton", "quack")
    code = (
        "import importlib, pkgutil, sys\n"
        "import gdn.integrations as place\n"
        "for one in pkgutil.iter_modules(place.__path__):\n"
        "    importlib.import_module('gdn.integrations.' + one.name)\n"
        f"print([name for name in {hosts!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
