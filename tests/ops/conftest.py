import pytest

from gdn.runtime import guards


@pytest.fixture(params=["torch", "python"])
def guard(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """What compares the tensors of a call with those of an earlier one."""
    if request.param == "python":
        monkeypatch.setattr(guards, "maker", lambda: guards.in_python)
    else:
        assert guards.maker() is not guards.in_python
