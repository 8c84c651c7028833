"""`gdn doctor` on hosts: versions, recorded signatures, and what `enable` would replace, from files alone."""

import sys

import pytest

from gdn.cli import doctor
from gdn.integrations import _hosts, _records, installed
from tests.integrations.conftest import KERNELS, FakeHost


def finding() -> doctor.Finding:
    (found,) = [one for one in doctor._hosts() if one.subject == "fakehost"]
    assert "fakehost" not in sys.modules
    return found


@pytest.fixture
def version(fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    """The host installed in the recorded version, with an adapter of its own."""
    monkeypatch.setattr(_records, "installed_version", lambda host: "1.0" if host.name == "fakehost" else None)
    find_spec = installed.importlib.util.find_spec
    monkeypatch.setattr(
        installed.importlib.util, "find_spec", lambda name: find_spec(name.replace("gdn.integrations.fakehost", "gdn"))
    )
    return fake


def test_the_recorded_version(version: FakeHost) -> None:
    text = "1.0, recorded signatures match; enable() replaces fakehost.kernels.double, fakehost.kernels.Layer.forward"
    assert finding() == doctor.Finding("fakehost", "ok", text)


def test_another_version_with_the_same_signatures(version: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_records, "installed_version", lambda host: "1.1")
    assert finding().level == "note" and finding().text.startswith("1.1 (tested: 1.0), recorded signatures match; enable()")


def test_another_body_and_another_signature(version: FakeHost) -> None:
    version.rewrite(KERNELS.replace('return ("host", x)', "return x"))
    found = finding()
    assert found.level == "note" and "fakehost.kernels.Layer.forward: its body changed since it was tested (1.0)" in found.text
    version.rewrite(KERNELS.replace("scale=2", "scale=3").replace("self.weight", "self.w"))
    found = finding()
    assert found.level == "warn" and "left alone, fakehost.kernels.double: its signature is not the recorded one" in found.text
    assert "(and 1 more)" in found.text and found.text.endswith("enable() replaces fakehost.kernels.Layer.forward")


def test_what_files_do_not_tell(version: FakeHost) -> None:
    (version.folder / "kernels.py").write_text("from elsewhere import double, Layer\n")
    found = finding()
    assert "judged only once it is imported: fakehost.kernels.double, fakehost.kernels.Layer.forward" in found.text
    assert "match" not in found.text and found.text.endswith("enable() replaces nothing")


def test_hosts_without_an_adapter_and_hosts_that_are_not_installed(fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_records, "installed_version", lambda host: "1.0" if host.name == "fakehost" else None)
    assert finding().text.endswith("this version of gdn has no adapter for it")
    last = doctor._hosts()[-1]
    assert (last.subject, last.level) == ("hosts", "ok")
    assert last.text == "not installed: " + ", ".join(sorted(_hosts.HOSTS.keys() - {"fakehost"}))
