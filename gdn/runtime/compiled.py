"""Compiled kernels: in memory, on disk, and their loading.

A kernel is compiled once per operator, backend, static fields and the compiled part of its configuration. A field of a Config
with `metadata={"compiled": function}` is an argument of the launch: the machine code depends only on function(value), which
`compile` may use (`bool` where 0 switches something off).

On disk a kernel is a folder with `manifest.json` and the shared libraries, named by the SHA-256 of all of the above, of its
sources and of the versions of the packages that compile and load it. Entries are written next to their place and moved there,
under a lock: readers see a whole entry or none, and only one of several processes compiles. An entry whose files do not match
its manifest is replaced. Reading an entry writes nothing, so a read-only cache works. A kernel that cannot be written into the
cache, or whose entry another user may have written (`cache_folder`), is compiled into a private folder of the process.

A folder that `gdn compile` built is such a cache with an index, which is asked first (`bundle`). GDN_COMPILE says what happens
where a kernel is found nowhere.

Loading an entry imports no DSL: the runtime library that the DSL ships is loaded by path, then tvm-ffi opens the kernel.
"""

import ctypes
import dataclasses
import errno
import functools
import hashlib
import json
import logging
import os
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from gdn.problem import Problem
from gdn.runtime import bundle, cache_folder, env, log, packages, source, toolchain

TARGET = "sm_90a"
FORMAT = 1  # version of the layout on disk


class KernelModule(Protocol):
    """The part of a kernel module that is used here."""

    __file__: str

    def compile(self, problem: Any, config: Any) -> dict[str, bytes]: ...


@dataclasses.dataclass(frozen=True)
class Compiled:
    """First argument of a kernel module's launch."""

    functions: Mapping[str, Callable[..., Any]]
    problem: Problem  # only the static fields are valid: the sizes are those of the call that compiled
    config: Any


class CompileError(RuntimeError):
    """Raised where a kernel that should compile does not."""


class MissingKernel(CompileError):
    """Raised with GDN_COMPILE=off for a kernel that is in no cache."""


_loaded: dict[tuple[str, str, str, Any], Compiled] = {}
_functions: dict[tuple[Any, ...], Mapping[str, Callable[..., Any]]] = {}  # keyed by the compiled fields only
_lock = threading.RLock()
_compilations = 0


def compilations() -> int:
    """Number of kernels that this process compiled, without those that it loaded from disk."""
    return _compilations


def forget() -> None:
    """Empties the memory cache; the disk cache stays."""
    with _lock:
        _loaded.clear()
        _functions.clear()
        bundle_versions.cache_clear()
        bundle.forget()


def get(op: str, backend: str, module: KernelModule, problem: Problem, config: Any) -> Compiled:
    """Returns the compiled kernel: from memory, from disk, or compiled now."""
    key = (op, backend, problem.static_key(), config)
    found = _loaded.get(key)
    if found is not None:
        return found
    with _lock:
        if key not in _loaded:
            code = (*key[:3], type(config), *compiled_fields(config).items())
            if code not in _functions:
                _functions[code] = load(backend, ensure(op, backend, module, problem, config))
            _loaded[key] = Compiled(_functions[code], problem, config)
        return _loaded[key]


def kept_cache() -> Path | None:
    """Folder in which compiled kernels outlive the process: GDN_CACHE_DIR, or the user's cache; None without a home folder."""
    if (given := env.current().cache_dir) is not None:
        return given
    import platformdirs

    try:
        found = Path(platformdirs.user_cache_dir("gdn-kernels"))
    except (RuntimeError, KeyError):  # the user id has no entry, and HOME is not set
        return None
    return found if found.is_absolute() else None  # older versions of platformdirs leave a ~ in it


def no_home() -> str:
    """Reason why there is no user cache."""
    return f"user {os.getuid()} has no home folder (the user id has no entry, and HOME is not set)"


def cache_dir() -> Path:
    """Folder of compiled kernels: `kept_cache()`, or where there is none this process's private folder, with a warning once."""
    root = kept_cache()
    if root is None:
        _warn_of_private_folder(no_home())
        return cache_folder.scratch()
    return root


def _warn_of_private_folder(reason: str) -> None:
    log.once(
        f"kernel cache: {reason}. Kernels are compiled into a private folder of this process instead, and again in every "
        "process; `gdn doctor` says more, GDN_CACHE_DIR names another cache",
        logging.WARNING,
    )


def versions(backend: str) -> dict[str, str]:
    """Versions of the packages that compile and load a kernel."""
    dsl = packages.DSLS[backend]
    return {one.distribution: packages.version(one) or "not installed" for one in (packages.TVM_FFI, dsl)}


@functools.cache
def bundle_versions() -> dict[str, str]:
    """Versions on which a folder of `gdn compile` depends: of gdn, the packages that compile and load, and the kernels' CUDA."""
    found = {"gdn": str(getattr(sys.modules["gdn"], "__version__", "?")), **versions("cute"), **versions("tilelang")}
    library = runtime_library("cute")
    return {**found, "CUDA": "none" if library is None else library.parent.parent.name.removeprefix("cu")}


def kept_bundle() -> tuple[bundle.Bundle | None, str | None]:
    """The index of the kept cache, and the reason why there is one that is not believed."""
    root = kept_cache()
    try:
        return (None, None) if root is None else (bundle.find(root, bundle_versions()), None)
    except bundle.Unusable as unusable:
        log.once(f"kernel cache: {unusable}. Its kernels are not used; {_rebuild(None)}", logging.WARNING)
        return None, str(unusable)


def _rebuild(found: bundle.Bundle | None) -> str:
    command = "gdn compile --model NAME -o DIR" if found is None else f"{found.command} -o {found.root}"
    return f"`{command}` builds them"


def source_of(module: KernelModule) -> str:
    """Hash of a kernel's sources: from the index of the kept cache, else by parsing them."""
    known = kept_bundle()[0]
    own = known.source_of(getattr(module, "__name__", "")) if known is not None else None
    return own or source.source_hash(module.__file__)


def compiled_fields(config: Any) -> dict[str, Any]:
    """Part of a configuration that decides the machine code, by field."""
    fields = dataclasses.fields(config)
    return {f.name: f.metadata.get("compiled", lambda value: value)(getattr(config, f.name)) for f in fields}


def entry_key(op: str, backend: str, module: KernelModule, problem: Problem, config: Any) -> str:
    """Name of an entry: changes with everything that may change the machine code."""
    parts = {
        "format": FORMAT, "op": op, "backend": backend, "problem": problem.static_fields(), "config": compiled_fields(config),
        "source": source_of(module), "versions": versions(backend), "target": TARGET,
    }  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def ensure(op: str, backend: str, module: KernelModule, problem: Problem, config: Any) -> Path:
    """Returns the folder of the kernel's entry; compiles it unless a whole, trusted entry exists.

    Needs no GPU and loads nothing. The entry is in the cache, or in this process's private folder where the cache cannot take
    it.
    """
    known, missing = kept_bundle()
    if known is not None:
        try:
            key = bundle.kernel_key(op, backend, problem.static_fields(), compiled_fields(config))
            place = known.place(key, backend, getattr(module, "__name__", ""))
            if place is not None:
                missing = cache_folder.distrust(known.root, place)
                if missing is None and libraries_of(place):
                    return place
        except bundle.Unusable as unusable:
            missing = str(unusable)
        except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
            missing = f"broken: {error}"
        if missing is not None:
            log.once(f"kernel cache: {missing}", logging.WARNING)
    if missing is not None:
        _refuse_if_off(op, backend, problem, config, missing)  # whatever else the folder may hold
    name = Path(f"{op}.{backend}", entry_key(op, backend, module, problem, config))
    about = _about(op, backend, problem, config)
    compile_once = functools.cache(lambda: _compile(op, backend, module, problem, config, missing))

    root, private = kept_cache(), cache_folder.existing_scratch()
    if private is not None and cache_folder.distrust(private, private / name) is None and is_whole(private / name):
        return private / name
    reason = no_home() if root is None else cache_folder.distrust(root, root / name)
    if root is not None and reason is None:
        if is_whole(root / name):
            log.debug(f"{op}.{backend} {name.name[:12]}: found in {root}")
            return root / name
        try:
            return _fill(root, name, compile_once, about)
        except cache_folder.Distrusted as error:
            reason = str(error)
        except OSError as error:
            reason = f"{root} cannot be written ({error.strerror or error})"
    assert reason is not None
    _warn_of_private_folder(reason)
    try:
        return _fill(cache_folder.scratch(), name, compile_once, about)
    except OSError as error:
        where = f"neither into {root or 'a user cache'} ({reason}) nor into a temporary folder ({error})"
        raise CompileError(f"{op}: the {backend} kernel can be written {where}") from error


def _fill(root: Path, name: Path, compile_once: Callable[[], Mapping[str, bytes]], about: Mapping[str, str]) -> Path:
    """Returns the entry of this name below the root, writing it unless it is whole; OSError where it cannot be written."""
    import filelock  # here, as the one below, since a process that finds its kernels needs neither

    place = root / name
    cache_folder.make_private(place.parent)
    if (reason := cache_folder.distrust(root, place)) is not None:  # the file system lets others write into it
        raise cache_folder.Distrusted(reason)
    try:
        with filelock.FileLock(place.with_suffix(".lock"), mode=0o600):  # of the entry's writers, between processes
            if not is_whole(place):  # another process may have compiled it while this one waited
                _write(place, compile_once(), about)
    except NotImplementedError as error:  # filelock's error for a file system without locks
        raise OSError(errno.ENOLCK, str(error)) from error
    return place


def has_entries(op: str, backend: str) -> bool:
    """Whether the disk cache holds a kernel of an operator: a machine without a compiler can still run these."""
    root = kept_cache()
    if root is None:
        return False
    entries = (manifest.parent for manifest in (root / f"{op}.{backend}").glob("*/manifest.json"))
    return any(cache_folder.distrust(root, entry) is None for entry in entries)


def _compile(op: str, backend: str, module: KernelModule, problem: Problem, config: Any, missing: str | None) -> dict[str, bytes]:
    """missing: reason why the kernel was not found where it should be."""
    _refuse_if_off(op, backend, problem, config, missing)
    if env.current().compile == "warn":
        what = _absent(op, backend, problem, config, missing)
        log.LOGGER.warning(f"{what}: it is compiled now (GDN_COMPILE=warn); {_rebuild(kept_bundle()[0])}")
    return _libraries(op, backend, module, problem, config)


def _absent(op: str, backend: str, problem: Problem, config: Any, missing: str | None) -> str:
    because = "" if missing is None else f" ({missing})"
    return f"{op}: the {backend} kernel for {problem.static_key()} with {config} is in no cache{because}"


def _refuse_if_off(op: str, backend: str, problem: Problem, config: Any, missing: str | None) -> None:
    if env.current().compile == "off":
        what = _absent(op, backend, problem, config, missing)
        raise MissingKernel(f"{what}, and GDN_COMPILE=off; {_rebuild(kept_bundle()[0])}")


def build(root: Path, op: str, backend: str, module: KernelModule, problem: Problem, config: Any) -> str:
    """Compiles a kernel into a folder unless its entry is there; returns the entry's name below the folder."""
    name = Path(f"{op}.{backend}", entry_key(op, backend, module, problem, config))
    _fill(root, name, lambda: _libraries(op, backend, module, problem, config), _about(op, backend, problem, config))
    return str(name)


def _about(op: str, backend: str, problem: Problem, config: Any) -> dict[str, str]:
    """What a manifest says of its kernel to a reader."""
    return {"op": op, "backend": backend, "problem": str(problem.static_key()), "config": str(config)}


def _libraries(op: str, backend: str, module: KernelModule, problem: Problem, config: Any) -> dict[str, bytes]:
    global _compilations
    lacking = toolchain.missing(backend)
    if lacking is not None:
        raise CompileError(f"{op}: the {backend} kernel {lacking}; `gdn doctor` says more")
    log.once(f"{op}: compiling {backend} kernel for {problem.static_key()} with {config}")
    start = time.perf_counter()
    try:
        libraries = module.compile(problem, config)
    except Exception as error:
        what = f"{op}: the {backend} kernel did not compile for {problem.static_key()} with {config}"
        raise CompileError(f"{what}: {error}") from error
    _compilations += 1
    log.debug(f"{op}.{backend}: compiled in {time.perf_counter() - start:.1f} s")
    return libraries


def _write(place: Path, libraries: Mapping[str, bytes], about: Mapping[str, str]) -> None:
    """Writes a whole entry and moves it to its place. The caller holds the entry's lock."""
    for left in place.parent.glob(f".{place.name}.*"):  # by processes that were killed while they held it
        shutil.rmtree(left, ignore_errors=True)
    temporary = place.with_name(f".{place.name}.{uuid.uuid4().hex}")
    temporary.mkdir(mode=0o700)
    try:
        listed = {}
        for name, library in libraries.items():
            digest = hashlib.sha256(library).hexdigest()
            file = f"{digest[:16]}.so"
            cache_folder.write_private(temporary / file, library)
            listed[name] = {"file": file, "sha256": digest}
        manifest = {"format": FORMAT, **about, "libraries": listed}
        cache_folder.write_private(temporary / "manifest.json", json.dumps(manifest, indent=1).encode())
        if place.exists():  # a broken entry: folders are only moved to free names
            broken = place.with_name(f".{place.name}.{uuid.uuid4().hex}")
            os.replace(place, broken)
            shutil.rmtree(broken, ignore_errors=True) if broken.is_dir() else broken.unlink(missing_ok=True)
        os.replace(temporary, place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def libraries_of(place: Path) -> dict[str, Path]:
    """Shared libraries of an entry, by entry name; ValueError or OSError where the entry is not whole."""
    manifest = json.loads((place / "manifest.json").read_text(encoding="utf-8"))
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or not manifest.get("libraries"):
        raise ValueError(f"{place}: not a manifest of format {FORMAT}")
    found = {}
    for name, listed in manifest["libraries"].items():
        path = place / Path(listed["file"]).name  # never a file outside of the entry
        if hashlib.sha256(path.read_bytes()).hexdigest() != listed["sha256"]:
            raise ValueError(f"{path}: does not match its manifest")
        found[name] = path
    return found


def is_whole(place: Path) -> bool:
    try:
        return bool(libraries_of(place))
    except FileNotFoundError:
        return False
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        log.once(f"broken cache entry, compiled again: {error}")
        return False


def runtime_library(backend: str) -> Path | None:
    """Shared library that a backend's kernels link against, found without importing the DSL; None where there is none."""
    # TileLang: not libtvm_runtime.so, on which it depends: the function that creates tensor maps for bulk copies is in this one.
    candidates = [folder / "lib" / "libtilelang.so" for folder in packages.folders("tilelang")]
    if backend != "tilelang":
        roots = packages.folders("nvidia_cutlass_dsl")
        # With the DSL only on PYTHONPATH, its inner folder may be all that is visible: <root>/dsl_packages/cutlass.
        roots += [folder.parent.parent for folder in packages.folders("cutlass")]
        candidates = [root / cuda / "lib" / "libcute_dsl_runtime.so" for root in roots for cuda in ("cu13", "cu12")]
    return next((path for path in candidates if path.is_file()), None)


def _loaded_before(backend: str) -> list[Path]:
    """Libraries that a backend's runtime library needs and looks for only beside its own package.

    They may lie elsewhere: in an environment over another one, for example. One that is loaded already is not looked for.
    """
    if backend != "tilelang":
        return []
    return [path for folder in packages.folders("z3") if (path := folder / "lib" / "libz3.so").is_file()]


@functools.cache
def _preload(backend: str) -> None:
    path = runtime_library(backend)
    if path is None:
        raise ImportError(f"{backend}: its runtime library was not found; install {packages.DSLS[backend].distribution}")
    for needed in _loaded_before(backend):
        ctypes.CDLL(str(needed))
    ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)  # the kernel's undefined symbols resolve against it


def load(backend: str, place: Path) -> dict[str, Callable[..., Any]]:
    """Loads the functions of an entry, by entry name."""
    import tvm_ffi

    if backend in packages.DSLS:
        _preload(backend)
    libraries = libraries_of(place)
    modules = {path: tvm_ffi.load_module(str(path)) for path in set(libraries.values())}  # tvm-ffi keeps them open
    return {name: modules[path][name] for name, path in libraries.items()}
