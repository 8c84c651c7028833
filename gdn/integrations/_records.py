"""The recorded signatures of hosts, and what is installed judged by them."""

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from gdn.integrations import _signatures
from gdn.integrations._hosts import Host

FOLDER = Path(__file__).parent / "recorded"


@dataclass(frozen=True)
class Verdict:
    """What the version guard says of one function or class.

    refusal: why it must not be replaced; None where its signature is a recorded one. warning: what changed although the
    signature is the same; None where the source is a recorded one too, or the host has no source of it.
    """

    refusal: str | None = None
    warning: str | None = None


@functools.cache
def load(host: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Version -> dotted name -> entry; empty where nothing is recorded of this host.

    The entry of a function has "parameters" (see `_signatures`) and "source" (a hash, or null), that of a class "attributes".
    """
    path = FOLDER / f"{host}.json"
    if not path.is_file():
        return {}
    versions: dict[str, dict[str, dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))["versions"]
    return versions


def installed_version(host: Host) -> str | None:
    """Version of the host's distribution; None where none of its distributions is installed."""
    for distribution in host.distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def judge_function(host: Host, name: str, parameters: _signatures.Parameters, source: str | None) -> Verdict:
    """Compares one function with its entries of all recorded versions: any of them may match. Newest version last."""
    entries = [entries[name] for entries in load(host.name).values() if name in entries]
    if not entries:
        return Verdict(refusal="its signature is not recorded")
    same = [one for one in entries if _signatures.difference(one["parameters"], parameters) is None]
    if not same:
        difference = _signatures.difference(entries[-1]["parameters"], parameters)
        return Verdict(refusal=f"its signature is not the recorded one: {difference} (tested: {host.tested})")
    hashes = {one["source"] for one in same}
    if source is not None and None not in hashes and source not in hashes:
        return Verdict(warning=f"its body changed since it was tested ({host.tested})")
    return Verdict()


def judge_class(host: Host, name: str, attributes: set[str]) -> Verdict:
    """Compares the attributes of a class with those that the adapter reads."""
    entries = [set(entries[name]["attributes"]) for entries in load(host.name).values() if name in entries]
    if not entries:
        return Verdict(refusal="its attributes are not recorded")
    if any(entry <= attributes for entry in entries):
        return Verdict()
    lacking = ", ".join(sorted(entries[-1] - attributes))
    return Verdict(refusal=f"it lacks the recorded attributes {lacking} (tested: {host.tested})")


def judge(host: Host, name: str, value: Callable[..., Any] | type) -> Verdict:
    """Judges an imported function or class of the host by its recorded name."""
    if inspect.isclass(value):
        return judge_class(host, name, _signatures.attributes_of_object(value))
    try:
        parameters = _signatures.of_object(value)
    except (TypeError, ValueError):
        return Verdict(refusal="it shows no signature")
    return judge_function(host, name, parameters, _signatures.source_of_object(value))
