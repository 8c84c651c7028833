"""Records the signatures of a host: `python -m tests.integrations.record HOST [--sources FOLDER --version VERSION]`.

Writes `gdn/integrations/recorded/<host>.json`. Reads an installed host, or the folder that holds its package (an unpacked
wheel), from the files alone: nothing is imported, so that hosts that do not run here can be recorded. Entries of other versions
stay, in the order of versions.
"""

import argparse
import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

from gdn.integrations import _records, _signatures, installed
from gdn.integrations._hosts import HOSTS, Host

# C++ file, relative to the folder of the package's sources, that binds functions which no Python file defines.
BINDINGS = {"deepgemm": "csrc/apis/attention.hpp"}


def of_pybind(text: str, name: str) -> _signatures.Parameters | None:
    """Parameters of a function in the C++ text that binds it with pybind11; None where the text does not bind it.

    Defaults that Python writes otherwise (names, `std::nullopt` but for None) are "?".
    """
    bound = re.search(rf'm\.def\("{re.escape(name)}",(.*?)\);', text, re.DOTALL)
    if bound is None:
        return None
    found = []
    for parameter, default in re.findall(r'py::arg\("(\w+)"\)(?:\s*=\s*([^,]+?))?\s*(?=,|$)', bound[1].strip()):
        words = {"true": "True", "false": "False", "std::nullopt": "None"}
        value = words.get(default, default)
        literal = (
            _signatures.UNKNOWN if "::" in value else _signatures._default(ast.parse(value, mode="eval").body) if value else ""
        )
        found.append([parameter, "any", *([literal] if value else [])])
    return found


def entry(host: Host, folder: Path, name: str) -> dict[str, Any]:
    """What is recorded of one name; ValueError where the files have no such definition."""
    located = installed.locate(folder, name)
    node = _signatures.find(*located) if located is not None else None
    if node is None and host.name in BINDINGS and (file := folder.parent / BINDINGS[host.name]).is_file():
        parameters = of_pybind(file.read_text(encoding="utf-8"), name.rpartition(".")[2])
        if parameters is not None:
            return {"parameters": parameters, "source": None}
    if located is None or node is None:
        raise ValueError(f"sources: expected a definition of {name} below {folder}, got none")
    if isinstance(node, ast.ClassDef):
        return {"attributes": sorted(host.classes[name])}
    return {"parameters": _signatures.of_node(node), "source": _signatures.source_of_node(located[0], node)}


def entries(host: Host, folder: Path) -> dict[str, dict[str, Any]]:
    """Everything that the adapter touches, by name. folder is the one of the host's package."""
    return {name: entry(host, folder, name) for name in (*host.functions, *host.classes)}


def write(host: Host, folder: Path, version: str) -> Path:
    """Adds or replaces the entries of one version in the host's file."""
    versions = {**_records.load(host.name), version: entries(host, folder)}
    ordered = {one: versions[one] for one in sorted(versions, key=_order)}
    path = _records.FOLDER / f"{host.name}.json"
    path.write_text(_text({"host": host.name, "versions": ordered}), encoding="utf-8")
    return path


def _order(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _text(data: dict[str, Any]) -> str:
    """JSON with a line for each parameter, so that a changed signature is a short difference."""
    text = json.dumps(data, indent=1)
    return re.sub(r"\[\s+((?:\"[^\"]*\",?\s*)+)\]", lambda found: "[" + " ".join(found[1].split()) + "]", text) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.integrations.record", description="Records the signatures of a host.")
    parser.add_argument("host", choices=sorted(HOSTS))
    parser.add_argument("--sources", type=Path, help="folder that holds the host's package; else the installed one")
    parser.add_argument("--version", help="version of the sources; else that of the installed distribution")
    given = parser.parse_args(arguments)
    host = HOSTS[given.host]
    folder = given.sources / host.package if given.sources else installed.package_folder(host.package)
    version = given.version or (None if given.sources else _records.installed_version(host))
    if folder is None or version is None:
        missing = "--version" if given.sources else f"{host.package}, installed, or --sources"
        sys.stderr.write(f"{host.name}: expected {missing}\n")
        return 2
    sys.stdout.write(f"{write(host, folder, version)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
