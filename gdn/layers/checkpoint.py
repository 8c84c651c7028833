"""Local checkpoints of Transformers: their configuration, and their tensors, each read when it is looked up."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, NoReturn

from torch import Tensor

from gdn.layers.config import HybridConfig

INDEX = "model.safetensors.index.json"
_POINTER = b"version https://git-lfs.github.com/spec/"  # what git has of a file that git-lfs has not fetched


def read_config(folder: Path | str) -> HybridConfig:
    """Configuration of a local checkpoint of Transformers: its config.json.

    Raises
    ------
    FileNotFoundError
        Where there is no such file.
    ValueError
        Named after the file, where it is no JSON, and where `HybridConfig.from_transformers` refuses what it says.
    """
    path = Path(folder) / "config.json"
    content = _read_json(path)
    try:
        return HybridConfig.from_transformers(content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


class SafetensorsFolder(Mapping[str, Tensor]):
    """Tensors of the `*.safetensors` files of a folder.

    With a `model.safetensors.index.json` each tensor comes from the file that the index names, whatever else is in the folder;
    without one every file counts, and each tensor is in one of them. Hidden files do not count. Every file that is needed is
    opened, and its length compared with its header, when the object is made.

    Parameters
    ----------
    folder : Path or str
        Folder of a checkpoint.

    Raises
    ------
    FileNotFoundError
        Where the folder has no such file, or not one that the index names.
    ModuleNotFoundError
        Where the package safetensors is not installed (the extra `layers`).
    OSError
        Where a file cannot be read.
    ValueError
        Named after the file: for one that is cut off, damaged or a pointer of git-lfs, an index that is no JSON or does not fit
        the files, and a tensor that is in two files without an index.
    """

    def __init__(self, folder: Path | str) -> None:
        folder, index = Path(folder), Path(folder) / INDEX
        place_of: dict[str, Path] | None = None
        if index.exists() or index.is_symlink():  # a broken link is no reason to do without
            place_of = _places(index)
            paths = sorted(set(place_of.values()))
        else:
            paths = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("."))
            if not paths:
                raise FileNotFoundError(f"no *.safetensors in {folder}")
        files = {path: _open(path, "which the index names" if place_of else "no broken link") for path in paths}
        names = {path: set(file.keys()) for path, file in files.items()}
        if place_of is None:
            place_of = {}
            for path in paths:
                for name in sorted(names[path]):
                    if name in place_of:
                        _refuse(path, f"no {name}, which {place_of[name].name} has, or an index that decides ({INDEX})", "both")
                    place_of[name] = path
        for name, path in place_of.items():
            if name not in names[path]:
                _refuse(path, f"the tensor {name}, as {INDEX} says", "none")
        self._file_of: dict[str, Any] = {name: files[path] for name, path in place_of.items()}

    def __getitem__(self, name: str) -> Tensor:
        value: Tensor = self._file_of[name].get_tensor(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def _places(index: Path) -> dict[str, Path]:
    """File of each tensor, as an index says."""
    content = _read_json(index)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not places:
        _refuse(index, "a weight_map, tensor to file", f"{content!r:.60}")
    for name, file in places.items():
        pure = PurePath(file) if isinstance(file, str) else None
        if pure is None or not pure.name or pure.is_absolute() or ".." in pure.parts:
            _refuse(index, f"a file of the folder for {name}", repr(file))
    return {name: index.parent / file for name, file in places.items()}


def _open(path: Path, which: str) -> Any:
    """An opened file of tensors; its header has been checked."""
    try:
        from safetensors import SafetensorError, safe_open  # an extra: nothing else needs it
    except ModuleNotFoundError as error:
        message = "checkpoints: expected the package safetensors, got none (pip install 'gdn-kernels[layers]')"
        raise ModuleNotFoundError(message, name="safetensors") from error

    if not path.exists():
        raise FileNotFoundError(f"{path}: expected a file, {which}, got none")
    _refuse_pointer(path)
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path}: expected whole safetensors, got a cut off or damaged file ({error})") from error


def _read_json(path: Path) -> Any:
    _refuse_pointer(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from error


def _refuse_pointer(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            _refuse(path, "the file itself", "a pointer of git-lfs (`git lfs pull` fetches the file)")


def _refuse(path: Path, expected: str, got: str) -> NoReturn:
    raise ValueError(f"{path}: expected {expected}, got {got}")
