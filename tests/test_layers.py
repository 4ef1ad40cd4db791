"""What the source may import, call and do at import time, read from the source itself (and once from a fresh process).

Every rule discovers the files, so a new module is held to them without being named here.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"
PACKAGE = SRC / "iota"
MAX_LINES = 450

LAYERS = (
    *("errors", "config.schema", "core", "config", "model", "wire", "store", "net", "nodes", "hf", "sim", "lab"),
    "cli",
)
"""Low to high; a module's layer is the longest prefix that it matches. The schema is pure declarations under `core`;
the rest of `config` (loading, checking) stands over it. The package itself is lowest, `__main__` belongs to the cli."""

CORE_MODULES = """
    __future__ abc base64 bisect collections contextlib copy dataclasses decimal enum fractions functools hashlib heapq
    hmac itertools json keyword math numbers operator re statistics string struct textwrap types typing zlib
    msgspec numpy iota
"""
CORE_FORBIDDEN_CALLS = "open input print breakpoint hash id"
"""I/O, and what differs from process to process."""
NODES_FORBIDDEN_MODULES = "time random secrets uuid datetime threading _thread concurrent sched"
NODES_FORBIDDEN = "asyncio.sleep asyncio.to_thread os.urandom"
UNSAFE_MODULES = "pickle _pickle cPickle cloudpickle dill joblib marshal shelve jsonpickle"
UNSAFE_CALLS = "eval exec compile __import__ torch.load torch.jit.load yaml.load"

IMPORT_TIME_CALLS = """
    abs bool bytes dict divmod enumerate float frozenset getattr int isinstance issubclass len list max min object
    ord chr pow range reversed round set sorted str sum tuple zip property classmethod staticmethod super type
    TypeVar ParamSpec TypeVarTuple NewType NamedTuple TypedDict namedtuple cast get_args get_type_hints
    collections.namedtuple typing.TypeVar typing.NewType typing.NamedTuple typing.get_args
    dataclass field dataclasses.dataclass dataclasses.field enum.auto auto
    msgspec.field msgspec.Meta Meta msgspec.defstruct msgspec.msgpack.Encoder msgspec.msgpack.Decoder
    msgspec.json.Encoder msgspec.json.Decoder msgspec.structs.fields msgspec.structs.asdict
    re.compile re.escape logging.getLogger getLogger struct.Struct Struct types.MappingProxyType MappingProxyType
    functools.partial partial operator.attrgetter operator.itemgetter contextvars.ContextVar ContextVar
    hashlib.sha256 hashlib.sha512 hashlib.blake2b sha256 bytes.fromhex dict.fromkeys
    np.dtype np.float32 np.float64 np.uint64 np.uint32 np.int64 numpy.dtype math.log math.log2 math.sqrt math.ceil
    textwrap.dedent Path PurePosixPath Fraction Decimal timedelta
"""
"""Calls that only make constants and types. `sha256` is `core.values.sha256`."""
IMPORT_TIME_METHODS = """
    encode decode join split splitlines strip format replace upper lower items keys values hexdigest digest union
"""


# ------------------------------------------------------------------------------------------------- reading the source


@cache
def modules() -> dict[str, Path]:
    """Every module under src/iota by dotted name without the leading "iota."; the package itself is ""."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = path
    return found


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text(encoding="utf-8"), str(modules()[name]))


def layer(name: str) -> int:
    if name == "":
        return -1
    if name == "__main__":
        return len(LAYERS) - 1
    matching = [(len(prefix), rank) for rank, prefix in enumerate(LAYERS) if f"{name}.".startswith(f"{prefix}.")]
    assert matching, f"iota.{name} belongs to no layer; known: {', '.join(LAYERS)}"
    if name == "config":  # its __init__ runs before the schema can be imported, so it must be as low
        return LAYERS.index("config.schema")
    return max(matching)[1]


def imports(name: str, node: ast.AST) -> list[str]:
    """Full dotted names that one import statement brings in (relative ones resolved), most specific first."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert isinstance(node, ast.ImportFrom)
    base = node.module or ""
    if node.level:
        here = ["iota", *name.split(".")] if name else ["iota"]
        keep = len(here) - node.level + (modules()[name].name == "__init__.py")
        base = ".".join([*here[:keep], *([base] if base else [])])
    out = []
    for alias in node.names:
        full = f"{base}.{alias.name}"
        is_module = base.split(".")[0] == "iota" and full.removeprefix("iota.") in modules()
        out.append(full if is_module else base)
    return out


def all_imports(name: str) -> Iterator[tuple[int, str]]:
    """Every import anywhere in the module, also inside functions and under TYPE_CHECKING: (line, dotted name)."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for target in imports(name, node):
                yield node.lineno, target


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or attribute chain; chains on other things keep what is known: `().digest`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return "()"


def names_of(name: str) -> dict[str, str]:
    """What local names stand for by the module's imports: {"np": "numpy", "sleep": "asyncio.sleep"}."""
    out = {}
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                out[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                out[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return out


def uses(name: str) -> Iterator[tuple[int, str]]:
    """Every name or attribute chain in the module with imports resolved: (line, "asyncio.sleep")."""
    known = names_of(name)
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Name | ast.Attribute):
            head, _, rest = dotted(node).partition(".")
            yield node.lineno, ".".join(filter(None, (known.get(head, head), rest)))


def calls(name: str) -> Iterator[tuple[int, str, list[ast.keyword]]]:
    """Every call in the module with imports resolved: (line, "torch.load", keywords)."""
    known = names_of(name)
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Call):
            head, _, rest = dotted(node.func).partition(".")
            yield node.lineno, ".".join(filter(None, (known.get(head, head), rest))), node.keywords


def report(found: list[str]) -> None:
    assert not found, "\n" + "\n".join(sorted(set(found)))


def at(name: str, line: int) -> str:
    return f"{modules()[name].relative_to(SRC.parent)}:{line}"


# ----------------------------------------------------------------------------------------------------------- layers


def test_no_layer_imports_upwards():
    bad = []
    for name in modules():
        for line, target in all_imports(name):
            if target.split(".")[0] == "iota":
                inner = target.removeprefix("iota").removeprefix(".")
                if layer(inner) > layer(name):
                    bad.append(f"{at(name, line)}: {name} imports {inner}, a layer above it")
    report(bad)


def eager(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The import statements that run when the module is imported."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING"):
            yield from eager(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.ClassDef | ast.With):
            yield from eager([*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])])
            for handler in getattr(node, "handlers", []):
                yield from eager(handler.body)


def test_no_import_cycles():
    edges = {
        name: {
            inner
            for node in eager(tree(name).body)
            for target in imports(name, node)
            if target.startswith("iota.") and (inner := target.removeprefix("iota.")) in modules() and inner != name
        }
        for name in modules()
    }
    while True:  # take away what imports nothing that is left; a cycle is what remains
        free = {name for name, to in edges.items() if not to & edges.keys()}
        if not free:
            break
        edges = {name: to for name, to in edges.items() if name not in free}
    assert not edges, f"these modules import each other in a circle (or import such): {sorted(edges)}"


def test_core_is_pure():
    bad = []
    for name in modules():
        if layer(name) not in (LAYERS.index("core"), LAYERS.index("config.schema"), LAYERS.index("errors")):
            continue
        for line, target in all_imports(name):
            root = target.split(".")[0]
            if root not in CORE_MODULES.split():
                bad.append(f"{at(name, line)}: core may not import {root}")
        for line, called, _ in calls(name):
            if called in CORE_FORBIDDEN_CALLS.split():
                bad.append(f"{at(name, line)}: core may not call {called}")
        for line, used in uses(name):
            bad.extend(f"{at(name, line)}: {why}" for why in global_randomness(used))
    report(bad)


def global_randomness(used: str) -> list[str]:
    """numpy's generators are fine when they are keyed by what the caller says; its global one is not."""
    if used.startswith("numpy.random.") and used.split(".")[2] not in ("Philox", "Generator"):
        return [f"use a Philox generator with an explicit key, not {used}"]
    return []


def test_nodes_take_only_injected_effects():
    bad = []
    for name in modules():
        if not name.startswith("nodes.") or name == "nodes.real":
            continue
        for line, target in all_imports(name):
            if target.split(".")[0] in NODES_FORBIDDEN_MODULES.split():
                bad.append(f"{at(name, line)}: nodes may not import {target}: use the injected clock, compute, entropy")
        for line, used in uses(name):
            if used in NODES_FORBIDDEN.split() or used.split(".")[-1] in ("run_in_executor", "to_thread"):
                bad.append(f"{at(name, line)}: nodes may not use {used}: use the injected clock, compute, entropy")
            bad.extend(f"{at(name, line)}: {why}" for why in global_randomness(used))
    report(bad)


# ----------------------------------------------------------------------------------------------------------- safety


def test_nothing_unpickles_or_evaluates():
    bad = []
    for name in modules():
        for line, target in all_imports(name):
            if target.split(".")[0] in UNSAFE_MODULES.split():
                bad.append(f"{at(name, line)}: imports {target}")
        for line, called, keywords in calls(name):
            if called in UNSAFE_CALLS.split():
                bad.append(f"{at(name, line)}: calls {called}")
            for word in keywords:
                if word.arg == "allow_pickle" and not (isinstance(word.value, ast.Constant) and not word.value.value):
                    bad.append(f"{at(name, line)}: allow_pickle")
    report(bad)


def test_files_are_short():
    long = {at(n, 1): count for n, p in modules().items() if (count := len(p.read_text().splitlines())) > MAX_LINES}
    assert not long, f"more than {MAX_LINES} lines: {long}"


# ------------------------------------------------------------------------------------------------- work at import time


def import_time_calls(node: ast.AST, inside: frozenset[str]) -> Iterator[ast.Call]:
    """Calls evaluated when the expression is: not those in the bodies of lambdas."""
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.Call):
        called = dotted(node.func)
        last = called.rsplit(".", 1)[-1]
        constant = called in IMPORT_TIME_CALLS.split() or last in inside
        if not constant and not ("." in called and last in IMPORT_TIME_METHODS.split()):
            yield node
    for child in ast.iter_child_nodes(node):
        yield from import_time_calls(child, inside)


def work(body: list[ast.stmt], inside: frozenset[str], top: bool = True) -> Iterator[ast.AST]:
    """Statements and calls that do something when the module is imported. `inside`: names of its frozen value types."""
    for node in body:
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Assert():
                continue
            case ast.Expr(value=ast.Constant()):
                continue
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                    yield from import_time_calls(default, inside)
            case ast.ClassDef():
                for word in [*node.bases, *(keyword.value for keyword in node.keywords)]:
                    yield from import_time_calls(word, inside)
                yield from work(node.body, inside, top=False)
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                if node.value is not None:
                    yield from import_time_calls(node.value, inside)
            case ast.If() if dotted(node.test).endswith("TYPE_CHECKING") or is_platform_test(node.test):
                yield from work([*node.body, *node.orelse], inside)
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))) if top:
                continue
            case ast.Try(handlers=handlers) if all(dotted(h.type or h).endswith("Error") for h in handlers):
                yield from work([*node.body, *node.orelse, *node.finalbody], inside)
                for handler in handlers:
                    yield from work(handler.body, inside)
            case _:
                yield node


def is_platform_test(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and dotted(test.left) in ("sys.platform", "os.name", "sys.version_info")


@cache
def value_types() -> frozenset[str]:
    """Frozen structs, dataclasses and named tuples of the package: making one as a default is a constant, not work."""
    frozen = {"NamedTuple"}
    classes = [node for name in modules() for node in ast.walk(tree(name)) if isinstance(node, ast.ClassDef)]
    while True:
        before = len(frozen)
        for node in classes:
            words = [*node.keywords, *(k for d in node.decorator_list if isinstance(d, ast.Call) for k in d.keywords)]
            own = any(w.arg == "frozen" and isinstance(w.value, ast.Constant) and w.value.value for w in words)
            if own or any(dotted(base).rsplit(".", 1)[-1] in frozen for base in node.bases):
                frozen.add(node.name)
        if len(frozen) == before:
            return frozenset(frozen)


MEANT = {"hf": ("raise ImportError(", "AutoConfig.register(", "AutoModelForCausalLM.register(")}
"""Work at import time that a module is there for: `import iota.hf` makes transformers know its classes."""


def test_importing_only_defines_names():
    report(
        [
            f"{at(name, getattr(node, 'lineno', 0))}: works at import time: {ast.unparse(node)[:80]}"
            for name in modules()
            for node in work(tree(name).body, value_types())
            if not ast.unparse(node).startswith(MEANT.get(name, ("\0",)))
        ]
    )


PROBE = """
import json, os, random, sys, threading
first, second = json.loads(sys.argv[1])
failed = {}
for name in first:
    try:
        __import__(name)
    except ImportError:
        pass
import numpy, torch

def state():
    return {
        "environ": dict(os.environ), "cwd": os.getcwd(), "umask": None, "path": list(sys.path),
        "threads": sorted(t.name for t in threading.enumerate()),
        "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "torch defaults": [str(torch.get_default_dtype()), torch.is_grad_enabled(),
                           torch.are_deterministic_algorithms_enabled()],
        "random": hash(random.getstate()), "torch random": torch.get_rng_state().tolist(),
        "numpy random": [str(part) for part in numpy.random.get_state()],
        "descriptors": sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else [],
    }

seen = []
def hook(event, args):
    if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        seen.append(f"open {args[0]!r} to write")
    elif event.split(".")[0] in ("socket", "subprocess", "signal") or event in (
        "os.mkdir", "os.rename", "os.remove", "os.fork", "os.system", "os.putenv", "_thread.start_new_thread",
        "os.posix_spawn", "sqlite3.connect", "pickle.find_class",
    ):
        seen.append(f"{event} {args!r}"[:200])

before, there = state(), set(os.listdir("."))
sys.addaudithook(hook)
for name in second:
    seen.append(name)
    __import__(name)
watched, seen = seen, []
after = state()
changed = {key: [str(before[key])[:300], str(after[key])[:300]] for key in before if before[key] != after[key]}
did, last = [], ""
for line in watched:
    if line in second:
        last = line
    else:
        did.append(f"{last}: {line}")
print(json.dumps({"changed": changed, "did": did, "files": sorted(set(os.listdir(".")) - there)}))
"""


@pytest.fixture(scope="module")
def fresh_environment(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    keep = {key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT") if key in os.environ}
    place = {"HOME": str(home), "TMPDIR": str(home), "PYTHONPATH": str(SRC)}
    return home, keep | place | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def outside() -> list[str]:
    """Everything not ours that our modules import at once: what those do at import is theirs, so they come first."""
    found = {
        target
        for name in modules()
        for node in eager(tree(name).body)
        for target in imports(name, node)
        if target.split(".")[0] not in ("iota", "__future__")
    }
    return sorted(found | {"asyncio", "ssl", "torch", "numpy"})


def test_importing_everything_changes_nothing(fresh_environment):
    home, environment = fresh_environment
    ours = [f"iota.{name}".rstrip(".") for name in modules() if name.rsplit(".", 1)[-1] != "__main__"]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps([outside(), ours])],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert json.loads(done.stdout) == {"changed": {}, "did": [], "files": []}


def test_core_and_config_load_neither_torch_nor_network(fresh_environment):
    home, environment = fresh_environment
    pure = [f"iota.{name}" for name in modules() if name and layer(name) <= LAYERS.index("core")]
    script = (
        f"import sys\nfor name in {pure!r}: __import__(name)\n"
        "print([m for m in ('torch', 'aiohttp', 'nacl', 'sqlite3', 'asyncio', 'socket') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=home, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    # numpy and msgspec may load standard modules of their own; the heavy and the third-party ones are never needed.
    loaded = set(ast.literal_eval(done.stdout))
    assert not loaded & {"torch", "aiohttp", "nacl", "sqlite3"}, loaded


# ----------------------------------------------------------------------------------- the rules catch what they should


def check_source(source: str) -> list[str]:
    return [ast.unparse(node) for node in work(ast.parse(source).body, frozenset({"Limits"}))]


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.set_num_threads(1)",
        "x = open('a')",
        "class A:\n    x = connect()",
        "def f(x=make()): ...",
        "for i in range(3): print(i)",
        "with open('a') as f: x = 1",
        "x = [load(i) for i in range(3)]",
        "if True:\n    pass",
        "class A(make()): ...",
        "del x",
    ],
)
def test_work_is_recognised(source):
    assert check_source(source)


@pytest.mark.parametrize(
    "source",
    [
        '"""doc"""\nimport re\nA = re.compile("x")\nB = 3 * 1024 + len("abc")',
        "from typing import TypeVar\nT = TypeVar('T')\nf = lambda: open('a')",
        "class A:\n    x: int = 3\n    limits: Limits = Limits(3)\n    def f(self): return open('a')",
        "try:\n    import pyarrow\nexcept ImportError:\n    pyarrow = None",
        "if TYPE_CHECKING:\n    import torch",
        "if __name__ == '__main__':\n    main()",
        "X = frozenset('a b'.split())\nY = {k: v for k, v in zip('ab', X)}",
    ],
)
def test_definitions_are_not_work(source):
    assert not check_source(source)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Lay out a package from {"core/x.py": source} and put it in place of the real one."""

    def build(files):
        for place, source in ({"__init__.py": "", "nodes/real.py": "import time\n"} | files).items():
            path = tmp_path / "src" / "iota" / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        monkeypatch.setattr(sys.modules[__name__], "SRC", tmp_path / "src")
        monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "src" / "iota")

    caches = (modules, tree, value_types)
    for cached in caches:
        cached.cache_clear()
    yield build
    for cached in caches:
        cached.cache_clear()


RULES = {
    "layer": test_no_layer_imports_upwards,
    "cycle": test_no_import_cycles,
    "core": test_core_is_pure,
    "nodes": test_nodes_take_only_injected_effects,
    "unsafe": test_nothing_unpickles_or_evaluates,
    "long": test_files_are_short,
    "work": test_importing_only_defines_names,
}


@pytest.mark.parametrize(
    ("rule", "files"),
    [
        ("layer", {"core/a.py": "def f():\n    from iota.model import b\n", "model/b.py": ""}),
        ("layer", {"core/a.py": "from iota import config\nfrom iota.config.load import x\n", "config/load.py": ""}),
        ("layer", {"wire/a.py": "from ..net import b\n", "net/b.py": "", "net/__init__.py": ""}),
        ("cycle", {"core/a.py": "from iota.core import b\n", "core/b.py": "from iota.core.a import x\n"}),
        ("core", {"core/a.py": "def f():\n    import torch\n"}),
        ("core", {"core/a.py": "import time\n"}),
        ("core", {"core/a.py": "import os.path\n"}),
        ("core", {"core/a.py": "import numpy as np\nf = lambda: np.random.rand()\n"}),
        ("core", {"core/a.py": "def f(p):\n    return open(p)\n"}),
        ("nodes", {"nodes/miner/a.py": "from time import time\n"}),
        ("nodes", {"nodes/a.py": "from concurrent.futures import ThreadPoolExecutor\n"}),
        ("nodes", {"nodes/a.py": "from asyncio import sleep as pause\nasync def f():\n    await pause(1)\n"}),
        ("nodes", {"nodes/a.py": "import asyncio as aio\nf = aio.to_thread\n"}),
        ("nodes", {"nodes/a.py": "def f(loop):\n    loop.run_in_executor(None, f)\n"}),
        ("unsafe", {"lab/a.py": "from pickle import loads\n"}),
        ("unsafe", {"lab/a.py": "from torch import load as read\nf = lambda p: read(p)\n"}),
        ("unsafe", {"lab/a.py": "import numpy\nf = lambda p: numpy.load(p, allow_pickle=True)\n"}),
        ("unsafe", {"cli/a.py": "f = lambda p: eval(p)\n"}),
        ("long", {"cli/a.py": "x = 1\n" * 451}),
        ("work", {"cli/a.py": "import torch\ntorch.set_num_threads(1)\n"}),
    ],
)
def test_rules_catch_violations(package, rule, files):
    package({"core/fine.py": "import math\nimport numpy as np\nG = lambda k: np.random.Philox(key=k)\n"})
    for test in RULES.values():
        test()
    for cached in (modules, tree, value_types):
        cached.cache_clear()
    package(files)
    with pytest.raises(AssertionError):
        RULES[rule]()


def test_layers_are_ranked():
    assert layer("errors") < layer("config") == layer("config.schema") < layer("core.values") < layer("config.load")
    assert layer("config.load") < layer("model.llama") < layer("wire.message") < layer("store.blobs")
    assert layer("net.http") < layer("nodes.miner.loop") < layer("sim.loop") < layer("cli.main") == layer("__main__")
    with pytest.raises(AssertionError, match="no layer"):
        layer("helpers")
    assert {"", "errors", "core.values", "nodes.effects"} <= modules().keys()
    assert all(hasattr(builtins, name) for name in CORE_FORBIDDEN_CALLS.split())
