"""`gdn doctor`: checks that this machine has what the kernels need, and says what to install."""

import importlib
import importlib.util
import sys
from dataclasses import dataclass

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gdn.cli.plain import AsJson, print_json
from gdn.cli.tune import tuner_folder
from gdn.integrations import installed
from gdn.ops.delta_rule.crossing import replay_rule
from gdn.runtime import cache_folder, compiled, env, packages, registry, source, toolchain, tuned


@dataclass(frozen=True)
class Finding:
    """One line of the report. level: ok | note (works, with limits) | warn (works, but needs attention) | fail."""

    subject: str
    level: str
    text: str


def doctor_command(as_json: AsJson = False) -> None:
    """Check that this machine has what the kernels need; exit code 1 where something is broken."""
    findings = diagnose()
    failed = any(finding.level == "fail" for finding in findings)
    if as_json:
        print_json({"ready": not failed, "findings": findings})
        raise typer.Exit(1 if failed else 0)
    table = Table("", "checked", title="gdn doctor", title_justify="left")
    table.add_column("found", overflow="fold")
    styles = {"ok": "green", "note": "yellow", "warn": "yellow", "fail": "red"}
    for finding in _summed_up(findings):
        table.add_row(Text(finding.level, styles[finding.level]), finding.subject, Text(finding.text))
    console = Console()
    console.print(table)
    console.print(_verdict(findings))
    if failed:
        raise typer.Exit(1)


def _verdict(findings: list[Finding]) -> str:
    if any(finding.level == "fail" for finding in findings):
        return "Something is missing: see above."
    if any(finding.subject.startswith("GPU ") and finding.level == "ok" for finding in findings):
        return "Ready."
    return "Ready, without a Hopper GPU: every call runs on the plain-torch reference, which is slow."


def _summed_up(findings: list[Finding]) -> list[Finding]:
    """The findings with one line for all tables of a folder that are in order, in the place of the first."""
    found: list[Finding] = []
    for finding in findings:
        same = [one for one in findings if one.subject == finding.subject and one.level == finding.level == "ok"]
        if len(same) < 2:
            found.append(finding)
        elif finding is same[0]:
            found.append(Finding(finding.subject, "ok", f"{len(same)} current ones (--json lists them)"))
    return found


def diagnose() -> list[Finding]:
    """Runs all checks, in the order of the report. Compiles nothing and launches nothing."""
    version, level = ".".join(map(str, sys.version_info[:3])), "ok" if sys.version_info >= (3, 11) else "fail"
    findings = [Finding("python", level, f"{version} (3.11 or newer is required)"), _torch(), *_gpu(), *_dsls(), *_compilers()]
    findings.append(_tuner())
    try:
        given = sorted(env.reload().given)
    except ValueError as error:
        return [*findings, Finding("switches", "fail", str(error))]
    switches = Finding("switches", "ok", ", ".join(given) or "none set (`gdn env` lists them)")
    replay = Finding("replay decode", "ok", replay_rule(env.current().replay))
    return [*findings, switches, replay, _cache(), *_tables(), *_hosts()]


def _torch() -> Finding:
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        return Finding("torch", "fail", f"not importable: {error}")
    if torch.version.cuda is None:
        return Finding("torch", "note", f"{torch.__version__}, built without CUDA: the reference runs")
    version = f"{torch.__version__}, CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        return Finding("torch", "note", f"{version}, but it sees no GPU: the reference runs")
    return Finding("torch", "ok", version)


def _gpu() -> list[Finding]:
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return [Finding("GPU", "note", "nvidia-ml-py is not installed, so the driver cannot be asked")]
    except nvml.NVMLError as error:
        return [Finding("GPU", "note", f"none, the reference runs ({error})")]
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        findings = [Finding("driver", "ok", f"{driver}, CUDA up to {cuda // 1000}.{cuda % 1000 // 10}")]
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
            name = f"{_text(nvml.nvmlDeviceGetName(handle))}, SM{capability[0]}{capability[1]}"
            level, remark = ("ok", "") if capability == (9, 0) else ("note", ": the kernels are for SM90, the reference runs")
            findings.append(Finding(f"GPU {index}", level, name + remark))
        return findings
    except nvml.NVMLError as error:
        return [Finding("GPU", "note", f"the driver does not answer: {error}")]
    finally:
        nvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _dsls() -> list[Finding]:
    findings = []
    for backend, module in (("tilelang", "tilelang"), ("cute", "cutlass.cute")):
        package = packages.DSLS[backend]
        distribution, unserved = package.distribution, packages.unserved(package)
        if unserved is not None:
            findings.append(Finding(backend, "warn", f"{unserved}: its kernels refuse, and the other DSL's run"))
            continue
        try:
            importlib.import_module(module)
        except Exception as error:  # an import of a large package may raise anything
            mend = f"; install {distribution}" if isinstance(error, ImportError) else ""
            findings.append(Finding(backend, "fail", f"{module} is not importable: {type(error).__name__}: {error}{mend}"))
            continue
        library, lacking = compiled.runtime_library(backend), "is installed without the library that its kernels need"
        text = lacking if library is None else f"{packages.version(package)}, {library}"
        findings.append(Finding(backend, "fail" if library is None else "ok", f"{distribution} {text}"))
    return [*findings, _tvm_ffi()]


def _tvm_ffi() -> Finding:
    if (unserved := packages.unserved(packages.TVM_FFI)) is not None:
        return Finding("tvm-ffi", "warn", f"{unserved}: kernels may not load")
    try:
        importlib.import_module("tvm_ffi")
    except (ImportError, OSError) as error:
        return Finding("tvm-ffi", "fail", f"not importable: {error}; install {packages.TVM_FFI.distribution}")
    return Finding("tvm-ffi", "ok", str(packages.version(packages.TVM_FFI)))


def _compilers() -> list[Finding]:
    no_nvcc = (
        "none on PATH, under CUDA_HOME or in the wheel: TileLang cannot compile (install tilelang[nvcc] or a CUDA toolkit); "
        "the CuTe backend works without it"
    )
    no_cc = "no cc on PATH: kernels cannot be linked (install gcc or clang)"
    found = (("nvcc", toolchain.nvcc(), "note", no_nvcc), ("host compiler", toolchain.host_compiler(), "fail", no_cc))
    return [Finding(name, level, why) if path is None else Finding(name, "ok", str(path)) for name, path, level, why in found]


def _tuner() -> Finding:
    try:
        return Finding("tuner", "ok", str(tuner_folder()))
    except ImportError as error:
        return Finding("tuner", "warn", f"{error}; `gdn tune` does not run")


def _cache() -> Finding:
    """Checks that compiled kernels are kept; without a cache they still run, compiled again in every process."""
    root = compiled.kept_cache()
    if root is None:
        mend = "kernels are compiled again in every process (set HOME, XDG_CACHE_HOME or GDN_CACHE_DIR)"
        return Finding("kernel cache", "warn", f"{compiled.no_home()}: {mend}")
    writable = cache_folder.is_writable(root)  # creates the folder
    entries = [manifest.parent for manifest in root.glob("*/*/manifest.json")]
    reasons = [reason for entry in [root, *entries] if (reason := cache_folder.distrust(root, entry)) is not None]
    if reasons:
        refused = f"{len(reasons)} refused, the first because {reasons[0]}" if len(reasons) > 1 else reasons[0]
        mend = "compiled again in every process; remove it, restrict it to your user, or set GDN_CACHE_DIR"
        return Finding("kernel cache", "warn", f"{root}, {len(entries)} kernels, not all of them trusted: {refused} ({mend})")
    if not writable:
        effect = "other kernels are compiled again in every process (set GDN_CACHE_DIR)"
        return Finding("kernel cache", "warn", f"{root}, {len(entries)} kernels; not writable, so {effect}")
    return Finding("kernel cache", "ok", f"{root}, {len(entries)} kernels")


def _tables() -> list[Finding]:
    """Reads every table of the package and of GDN_TUNED_DIR."""
    findings = []
    own = env.current().tuned_dir
    for label, folder in [("tuned tables", tuned.SHIPPED), *([("GDN_TUNED_DIR", own)] if own is not None else [])]:
        if not folder.is_dir():
            what = "is not a folder" if folder.exists() else "does not exist"
            findings.append(Finding(label, "warn", f"{folder} {what}: it is not searched for tables"))
            continue
        paths = sorted(folder.glob("*/*.json"))
        for path in paths:
            try:
                table = tuned.read(path)
            except (ValueError, OSError) as error:
                findings.append(Finding(label, "fail", str(error)))
                continue
            name, stale = f"{path.parent.name}/{path.name}", _stale(table)
            count = table.num_entries()
            text = f"{name}: {count} {'entry' if count == 1 else 'entries'}, {max(table.header.runs, default='never measured')}"
            findings.append(Finding(label, "warn" if stale else "ok", text + stale))
        if not paths:
            findings.append(Finding(label, "note", f"none in {folder}: kernels use their default tiles"))
    return findings


def _stale(table: tuned.Table) -> str:
    """Remark on entries that were measured with another version of the kernel; empty where all are current."""
    module = registry.operator(table.header.op).modules.get(table.header.backend)
    spec = importlib.util.find_spec(module) if module is not None else None
    if spec is None or spec.origin is None:
        return ", for a kernel that does not exist"
    count = table.num_stale(source.source_hash(spec.origin))
    return f", {count} stale: measured with another version of the kernel (`gdn tune --restamp`)" if count else ""


def _hosts() -> list[Finding]:
    """The libraries that `gdn.integrations` serves, judged from their files: none is imported."""
    found = installed.find_all()
    absent = [one.host for one in found if one.version is None]
    hosts = [_host(one) for one in found if one.version is not None]
    return [*hosts, Finding("hosts", "ok", f"not installed: {', '.join(absent)}")] if absent else hosts


def _host(one: installed.Installed) -> Finding:
    """What `gdn.integrations.<host>.enable` would do."""
    version = str(one.version) if one.is_tested else f"{one.version} (tested: {one.tested})"
    left = [f"{name}: {verdict.refusal}" for name, verdict in one.names.items() if verdict is not None and verdict.refusal]
    changed = [f"{name}: {verdict.warning}" for name, verdict in one.names.items() if verdict is not None and verdict.warning]
    unseen = [name for name, verdict in one.names.items() if verdict is None]
    parts = [f"{version}, recorded signatures match" if not (left or unseen) else version]
    if left:
        parts.append(f"left alone, {left[0]}" + (f" (and {len(left) - 1} more)" if len(left) > 1 else ""))
    if unseen:
        parts.append(f"judged only once it is imported: {', '.join(unseen)}")
    parts += changed
    names = [name for name in one.replaced if (verdict := one.names.get(name)) is not None and not verdict.refusal]
    parts.append(f"enable() replaces {_short_names(names)}" if one.has_adapter else "this version of gdn has no adapter for it")
    return Finding(one.host, "warn" if left else "note" if changed or not one.is_tested else "ok", "; ".join(parts))


def _short_names(names: list[str]) -> str:
    """Dotted names without their modules where there are many, each once, since modules of one kind hold the same names."""
    if len(names) < 6:
        return ", ".join(names) or "nothing"
    short = [".".join(parts[-2:] if parts[-2][:1].isupper() else parts[-1:]) for parts in (name.split(".") for name in names)]
    return f"{', '.join(dict.fromkeys(short))} ({len(names)} in all)"
