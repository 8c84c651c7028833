"""The hosts of this machine judged from their files: nothing is imported, so that this is quick and cannot fail with a host."""

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from gdn.integrations import _records, _signatures
from gdn.integrations._hosts import HOSTS, Host


@dataclass(frozen=True)
class Installed:
    """A host: its version (None: not installed), and for each recorded name what the version guard says of it.

    tested: the recorded versions in words; is_tested: whether this very version is recorded. has_adapter: whether this version of
    the project can `enable` it. names maps each name that the adapter replaces or calls to a verdict, or to None where the files
    do not tell (a function that is compiled, or made when the host is imported); replaced are those that `enable` replaces.
    """

    host: str
    version: str | None
    tested: str
    is_tested: bool
    has_adapter: bool
    names: dict[str, _records.Verdict | None]
    replaced: tuple[str, ...]


def find_all() -> list[Installed]:
    """Every host that an adapter exists or is recorded for, in the order of their names."""
    return [find(HOSTS[name]) for name in sorted(HOSTS)]


def find(host: Host) -> Installed:
    version, folder = _records.installed_version(host), package_folder(host.package)
    names: dict[str, _records.Verdict | None] = {}
    if version is None or folder is None:
        version = None
    else:
        names = {name: judge(host, folder, name) for name in (*host.functions, *host.classes)}
    has_adapter = importlib.util.find_spec(f"gdn.integrations.{host.name}") is not None
    replaced = tuple(host.replaced or host.functions)
    return Installed(host.name, version, host.tested, version in _records.load(host.name), has_adapter, names, replaced)


def package_folder(package: str) -> Path | None:
    """Folder of an installed package; None where it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(locations[0]) if locations else None


def judge(host: Host, folder: Path, name: str) -> _records.Verdict | None:
    """Judges one name by the host's files below `folder`, the folder of its package; None where they do not tell."""
    located = locate(folder, name)
    if located is None:
        return _records.Verdict(refusal="its module is not there")
    path, qualified = located
    node = _signatures.find(path, qualified)
    if node is None:
        return None
    if isinstance(node, ast.ClassDef):
        lacking = _records.judge_class(host, name, _signatures.attributes_of_node(node))
        return None if lacking.refusal and node.bases else lacking  # a base may have what the class lacks
    return _records.judge_function(host, name, _signatures.of_node(node), _signatures.source_of_node(path, node))


def locate(folder: Path, name: str) -> tuple[Path, str] | None:
    """File, and name in it, of a dotted name below a package's folder; None where there is no such module."""
    parts = name.split(".")[1:]
    for length in range(len(parts) - 1, -1, -1):
        base = folder.joinpath(*parts[:length])
        for path in (base.with_name(f"{base.name}.py"), base / "__init__.py"):
            if path.is_file():
                return path, ".".join(parts[length:])
    return None
