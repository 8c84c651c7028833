"""Folders of checkpoints: the index decides, hidden files do not count, and a bad file is named when the folder is opened."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from gdn.cli import app
from gdn.layers.checkpoint import INDEX, SafetensorsFolder, read_config
from tests.layers import hf

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4967442200\n"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def shards(folder: Path, *, index: bool = True) -> None:
    """Tensor a in the first file, b and c in the second."""
    save_file({"a": torch.zeros(2)}, folder / FIRST)
    save_file({"b": torch.ones(3), "c": torch.ones(1)}, folder / SECOND)
    if index:
        write_index(folder, {"a": FIRST, "b": SECOND, "c": SECOND})


def write_index(folder: Path, places: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 24}, "weight_map": places}))


def test_the_index_decides(tmp_path: Path) -> None:
    shards(tmp_path)
    stale = {"a": torch.full((2,), 7.0), "old": torch.zeros(1)}
    for name in ("a.safetensors", "model.safetensors", "z.safetensors"):
        save_file(stale, tmp_path / name)
    (tmp_path / "zz.safetensors").write_bytes(b"of another program")
    found = SafetensorsFolder(tmp_path)
    assert sorted(found) == ["a", "b", "c"] and len(found) == 3
    assert found["a"].tolist() == [0.0, 0.0] and found["b"].tolist() == [1.0] * 3
    save_file({"a": torch.full((2,), 5.0), "b": torch.ones(3), "c": torch.ones(1)}, tmp_path / SECOND)
    assert SafetensorsFolder(tmp_path)["a"].tolist() == [0.0, 0.0], "in two files that the index names"


def test_without_an_index_every_file_counts_and_duplicates_are_refused(tmp_path: Path) -> None:
    shards(tmp_path, index=False)
    assert sorted(SafetensorsFolder(tmp_path)) == ["a", "b", "c"]
    save_file({"b": torch.zeros(3)}, tmp_path / "z.safetensors")
    message = rf"z\.safetensors: expected no b, which {SECOND} has, or an index .*{INDEX}.*, got both"
    with pytest.raises(ValueError, match=message):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("index", [False, True])
def test_hidden_files_do_not_count(index: bool, tmp_path: Path) -> None:
    shards(tmp_path, index=index)
    for name in (f"._{FIRST}", "._model.safetensors", ".safetensors", f"._{INDEX}"):
        (tmp_path / name).write_bytes(b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        ")
    assert sorted(SafetensorsFolder(tmp_path)) == ["a", "b", "c"]


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def pointer(path: Path) -> None:
    path.write_bytes(POINTER)


def broken_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent / "nowhere")


# What becomes of the second file -> error, message.
DAMAGES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "cut off": (cut_off, ValueError, "expected whole safetensors, got a cut off or damaged file"),
    "cut off in its header": (lambda path: path.write_bytes(path.read_bytes()[:20]), ValueError, "cut off or damaged"),
    "empty": (lambda path: path.write_bytes(b""), ValueError, "expected whole safetensors, got a cut off"),
    "a pointer": (pointer, ValueError, "expected the file itself, got a pointer of git-lfs"),
    "a broken link": (broken_link, FileNotFoundError, "expected a file, "),
}


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(damage: str, index: bool, tmp_path: Path) -> None:
    change, error, message = DAMAGES[damage]
    shards(tmp_path, index=index)
    change(tmp_path / SECOND)
    with pytest.raises(error, match=message) as caught:
        SafetensorsFolder(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / SECOND}: expected") and "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(OSError) as caught:
        SafetensorsFolder(tmp_path)
    assert caught.value.filename == str(tmp_path / "model.safetensors")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shards(tmp_path)
    (tmp_path / FIRST).unlink()
    with pytest.raises(FileNotFoundError, match=f"{FIRST}: expected a file, which the index names, got none"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", f"{INDEX}: expected JSON, got Expecting"),
        (POINTER.decode(), f"{INDEX}: expected the file itself, got a pointer of git-lfs"),
        ("[]", f"{INDEX}: expected a weight_map, tensor to file, got \\[\\]"),
        ('{"weight_map": {}}', f"{INDEX}: expected a weight_map"),
        ('{"weight_map": {"a": 3}}', f"{INDEX}: expected a file of the folder for a, got 3"),
        ('{"weight_map": {"a": "../x.safetensors"}}', f"{INDEX}: expected a file of the folder for a, got"),
        ('{"weight_map": {"a": "/x.safetensors"}}', f"{INDEX}: expected a file of the folder for a, got"),
        (f'{{"weight_map": {{"b": "{FIRST}"}}}}', f"{FIRST}: expected the tensor b, as {INDEX} says, got none"),
    ],
)
def test_an_index_that_does_not_fit_is_named(content: str, message: str, tmp_path: Path) -> None:
    shards(tmp_path)
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ValueError, match=message):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json: expected JSON, got Expecting"),
        ("[1]", "config.json: config: expected a configuration of Transformers or a dict, got list"),
        ('{"model_type": "qwen3_next", "head_dim": "64"}', "config.json: head_dim: expected an int, got str"),
        ('{"model_type": "llama"}', "config.json: model_type: expected one of"),
        (POINTER.decode(), "config.json: expected the file itself, got a pointer of git-lfs"),
    ],
)
def test_a_configuration_that_does_not_fit_is_named(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize("problem", [*DAMAGES, "a missing shard", "twice", "a tensor that is missing", "config", "nothing"])
def test_the_demo_says_it_in_one_line(problem: str, tmp_path: Path) -> None:
    """On stderr, with status 2, before anything is printed."""
    reference = hf.build("qwen3_5", 1)
    reference.save_pretrained(tmp_path, max_shard_size="100KB")
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    named = files[1]
    if problem in DAMAGES:
        DAMAGES[problem][0](tmp_path / named)
    elif problem == "a missing shard":
        (tmp_path / named).unlink()
    elif problem == "twice":
        (tmp_path / INDEX).unlink()
        named = "z.safetensors"
        (tmp_path / named).write_bytes((tmp_path / files[1]).read_bytes())
    elif problem == "a tensor that is missing":
        index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
        named = "layers.1.self_attn.q_proj.weight"
        write_index(tmp_path, {name: file for name, file in index.items() if not name.endswith(named)})
    elif problem == "config":
        named = "config.json"
        (tmp_path / named).write_text('{"model_type": "qwen3_5_text", "rms_norm_eps": "small"}')
    else:
        for path in tmp_path.glob("*.safetensors*"):
            path.unlink()
        named = "no *.safetensors"
    result = CliRunner().invoke(app.app, ["demo", "--checkpoint", str(tmp_path), "--device", "cpu", "--steps", "1"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and named in result.stderr
