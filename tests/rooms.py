"""Reads the source of the packages and tells where it breaks the rules of the house; test_rooms.py runs it.

A rule is a function from a `House` to the violations it finds. It looks at syntax trees alone: nothing is imported, so
a broken module can still be judged, and the rules can be tried on snippets.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

PACKAGES = ("llama_native", "statecodec", "splitctl")

# ---- what each folder may use: a module stands in the rules through its folder, or by what its docstring says ----

#: Third-party packages of each folder, beside the standard library.
THIRD_PARTY: Mapping[str, frozenset[str]] = {
    "llama_native": frozenset({"cffi", "numpy"}),
    "statecodec": frozenset({"numpy", "gguf"}),
    "splitctl": frozenset({"numpy", "click", "rich", "safetensors", "xxhash", "jinja2", "psutil", "platformdirs"}),
    "splitctl.http": frozenset({"starlette", "uvicorn", "h11", "prometheus_client"}),
    "splitctl.cli": frozenset({"PIL", "matplotlib"}),
}
#: Standard modules that a leaf has no business with.
FORBIDDEN_STANDARD: Mapping[str, frozenset[str]] = {
    "llama_native": frozenset({"subprocess", "multiprocessing", "asyncio", "argparse", "logging"}),
    "statecodec": frozenset(
        [
            "os",
            "io",
            "mmap",
            "ctypes",
            "threading",
            "multiprocessing",
            "subprocess",
            "socket",
            "asyncio",
            "signal",
            "time",
            "datetime",
            "random",
            "secrets",
            "logging",
            "warnings",
            "pathlib",
            "shutil",
            "tempfile",
            "glob",
            "sys",
            "argparse",
            "importlib",
            "concurrent",
        ]
    ),
}
#: What a pure module does without: its answer depends on its input alone.
IMPURE_STANDARD = FORBIDDEN_STANDARD["statecodec"] | {"uuid", "fcntl", "resource", "selectors"}
#: A folder that is pure as a whole; elsewhere a module says "Pure." in the first paragraph of its docstring.
PURE_FOLDERS = frozenset({"splitctl.planning"})

#: Height of each folder and loose module of splitctl; imports go down, or stay in the folder.
HEIGHT: Mapping[str, int] = {
    "__main__": 13,
    "cli": 12,
    "http": 11,
    "host": 10,
    "client": 10,
    "control": 9,
    "worker": 9,
    "compat": 9,
    "session": 8,
    "switching": 7,
    "ipc": 6,
    "probing": 5,
    "planning": 4,
    "engine": 4,
    "carry": 3,
    "model": 2,
    "outcome": 2,
    "placement": 1,
    "errors": 0,
    "places": 0,
    "host_memory": 0,
    "last_words": 0,
}
#: Which folders may use which leaf. One module of the house uses both.
USES_LIBRARY = frozenset({"compat", "worker", "session", "switching", "probing", "engine", "model"})
USES_CODEC = frozenset({"cli", "switching", "carry", "model"})
#: The folder that runs in a process of its own, which holds the library; nobody else imports it.
WORKER = "worker"
#: May print, exit and read argv and the environment: the command line, and the entry of the child process.
SPEAKS = ("splitctl.cli*", "splitctl.__main__", "splitctl.worker.main")
#: Open shared libraries: libllama, and the CUDA driver.
OPENS = ("llama_native.library", "llama_native.pinning")
#: Read the environment too: where an embedder's session opens, or a program looks for a hosted one, there is no command
#: line that could pass it on.
READS_ENVIRONMENT = frozenset({"splitctl.session.opening", "splitctl.client.target", "splitctl.compat.llama_cpp.files"})

#: A module says one thing, in about 400 lines; a cohesive one may take more.
MAX_LINES = 600


@dataclass(frozen=True, slots=True)
class Violation:
    """One place that breaks one rule.

    Args:
        module: Dotted name.
        line: From 1; 0 for the module as a whole.
        text: What is there and why it may not be.
    """

    module: str
    line: int
    text: str

    def __str__(self) -> str:
        """As `module:line: text`."""
        return f"{self.module}:{self.line}: {self.text}"


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name.

    Args:
        target: The module that it comes from, as exactly as the house tells.
        line: From 1.
        typing_only: It stands under `if TYPE_CHECKING`, so it never runs.
    """

    target: str
    line: int
    typing_only: bool

    @property
    def top(self) -> str:
        """The outermost package."""
        return self.target.partition(".")[0]


@dataclass(frozen=True)
class Module:
    """One module of the house.

    Args:
        name: Dotted name.
        source: Its text.
        is_package: It is the `__init__` of a package.
    """

    name: str
    source: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.source)

    @property
    def folder(self) -> str:
        """The folder within splitctl, or the module's own name where it lies loose; empty for the leaves."""
        parts = self.name.split(".")
        return parts[1] if parts[0] == "splitctl" and len(parts) > 1 else ""

    @property
    def is_pure(self) -> bool:
        """Whether its folder or its docstring says so."""
        said = (ast.get_docstring(self.tree) or "").split("\n\n")[0]
        return self.is_below(PURE_FOLDERS) or re.search(r"\bPure\.$", said) is not None

    def is_below(self, folders: Iterable[str]) -> bool:
        """Whether it is one of the folders or lies in one."""
        return any(self.name == folder or self.name.startswith(f"{folder}.") for folder in folders)

    def is_one_of(self, patterns: Iterable[str]) -> bool:
        """Whether one of the patterns fits the name."""
        return any(fnmatchcase(self.name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class House:
    """All modules that the rules look at.

    Args:
        modules: By dotted name.
    """

    modules: Mapping[str, Module]

    @classmethod
    def read(cls, root: Path) -> House:
        """Read the three packages below a checkout.

        Args:
            root: The folder that holds them.
        """
        modules = {}
        for package in PACKAGES:
            for path in sorted((root / package).rglob("*.py")):
                parts = path.relative_to(root).with_suffix("").parts
                is_package = parts[-1] == "__init__"
                name = ".".join(parts[:-1] if is_package else parts)
                modules[name] = Module(name, path.read_text(encoding="utf-8"), is_package)
        return cls(modules)

    @classmethod
    def of(cls, sources: Mapping[str, str]) -> House:
        """A house of snippets.

        Args:
            sources: Text by dotted name; a name with a module below it is a package.
        """
        packages = {name.rpartition(".")[0] for name in sources}
        return cls({name: Module(name, text, name in packages) for name, text in sources.items()})

    def imports(self, module: Module) -> Iterator[Import]:
        """Every import of a module, wherever it stands in it."""
        quiet = {
            id(inner)
            for node in ast.walk(module.tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for statement in node.body
            for inner in ast.walk(statement)
        }
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(alias.name, node.lineno, id(node) in quiet)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(module, node)
                for alias in node.names:
                    inner = f"{base}.{alias.name}"
                    yield Import(inner if inner in self.modules else base, node.lineno, id(node) in quiet)

    @staticmethod
    def _base(module: Module, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        parts = module.name.split(".")
        kept = parts[: len(parts) - node.level + int(module.is_package)]
        return ".".join([*kept, *([node.module] if node.module else [])])


_OPENERS = frozenset({"open", "input", "print", "eval", "exec", "__import__"})

Rule = Callable[[House], Iterator[Violation]]


def uses(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name and dotted name that a tree reads or calls, with its line: `print`, `sys.exit`, `self.ffi.new`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node), node.lineno


# ---- the rules ----


def leaves_do_not_see_each_other(house: House) -> Iterator[Violation]:
    """The leaves import nothing of the house but themselves, and nobody imports tools or tests."""
    for module in house.modules.values():
        package = module.name.partition(".")[0]
        for found in house.imports(module):
            if found.top in {"tools", "tests", "ci", "conftest"}:
                yield Violation(module.name, found.line, f"imports {found.target}; programs and tests use the packages")
            elif found.top in PACKAGES and package not in {found.top, "splitctl"}:
                yield Violation(module.name, found.line, f"imports {found.target}; a leaf knows no other package")


def only_declared_packages(house: House) -> Iterator[Violation]:
    """Beside the standard library a package uses what setup.cfg says it needs, and a leaf less than that."""
    for module in house.modules.values():
        allowed = set(PACKAGES).union(*(more for folder, more in THIRD_PARTY.items() if module.is_below([folder])))
        forbidden = FORBIDDEN_STANDARD.get(module.name.partition(".")[0], frozenset())
        for found in house.imports(module):
            # Type checkers bring typing_extensions along; at run time it may be absent.
            known = found.top in sys.stdlib_module_names or (found.typing_only and found.top == "typing_extensions")
            if not known and found.top not in allowed:
                yield Violation(module.name, found.line, f"imports {found.target}, which is not for this package")
            if found.top in forbidden and not found.typing_only:
                yield Violation(module.name, found.line, f"imports {found.target}; this leaf does without")


def imports_go_down(house: House) -> Iterator[Violation]:
    """Inside splitctl imports go down, those for type checking too, and every folder has its height."""
    for module in house.modules.values():
        folder = module.folder
        if not folder:
            continue
        if folder not in HEIGHT:
            yield Violation(module.name, 0, "has no height: say in tests/rooms.py above what it stands")
            continue
        for found in house.imports(module):
            other = found.target.split(".")[1] if found.target.startswith("splitctl.") else ""
            if found.target == "splitctl" or (other != folder and HEIGHT.get(other, -1) >= HEIGHT[folder]):
                yield Violation(module.name, found.line, f"imports {found.target}, which stands above or beside it")


def no_import_cycles(house: House) -> Iterator[Violation]:
    """No module needs itself, through whichever others, for type checking neither."""
    graph = {
        name: {i.target for i in house.imports(module) if i.target in house.modules} - {name}
        for name, module in house.modules.items()
    }
    finished: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> Iterator[Violation]:
        if name in path:
            circle = (*path[path.index(name) :], name)
            yield Violation(name, 0, "needs itself: " + " -> ".join(circle))
        elif name not in finished:
            for target in sorted(graph[name]):
                yield from walk(target, (*path, name))
            finished.add(name)

    for name in sorted(graph):
        yield from walk(name, ())


def leaves_are_used_where_said(house: House) -> Iterator[Violation]:
    """One module knows both leaves; supervisor, control, http and cli know no native library."""
    with_both = []
    for module in house.modules.values():
        if not module.name.startswith("splitctl"):
            continue
        seen: dict[str, int] = {}
        for found in house.imports(module):
            seen.setdefault(found.top, found.line)
            if found.target.startswith(f"splitctl.{WORKER}") and module.folder != WORKER:
                yield Violation(module.name, found.line, f"imports {found.target}, which runs in the worker alone")
        for leaf, users in (("llama_native", USES_LIBRARY), ("statecodec", USES_CODEC)):
            if leaf in seen and module.folder not in users:
                yield Violation(module.name, seen[leaf], f"imports {leaf}; {', '.join(sorted(users))} do")
        if {"llama_native", "statecodec"} <= seen.keys():
            with_both.append((module.name, seen["statecodec"]))
    for name, line in with_both if len(with_both) > 1 else ():
        yield Violation(name, line, f"imports both leaves; one module does, and here are {len(with_both)}")


def leaves_are_entered_by_the_front(house: House) -> Iterator[Violation]:
    """The public names of a leaf, its public modules among them, are those in `__all__` of its `__init__`."""
    for module in house.modules.values():
        for found in house.imports(module):
            leaf, _, inner = found.target.partition(".")
            if not module.name.startswith("splitctl") or leaf not in {"llama_native", "statecodec"} or not inner:
                continue
            face = house.modules.get(leaf)
            if face is None or f'"{inner}"' not in face.source:
                yield Violation(module.name, found.line, f"imports {found.target}; public names stand in __init__")


def native_objects_stay_inside(house: House) -> Iterator[Violation]:
    """C is reached through cffi and in llama_native alone; library.py opens libllama, pinning.py the CUDA driver."""
    for module in house.modules.values():
        inside = module.name.startswith("llama_native")
        for found in house.imports(module):
            if found.top in {"cffi", "_cffi_backend"} and not inside:
                yield Violation(module.name, found.line, "imports cffi outside llama_native")
            if found.top == "ctypes":
                yield Violation(module.name, found.line, "imports ctypes; cffi in llama_native is the one way to C")
        for name, line in uses(module.tree):
            last = name.rpartition(".")[2]
            if not inside and last in {"ffi", "_ffi", "_lib", "cdata"}:
                yield Violation(module.name, line, f"reaches for {name}; no C object leaves llama_native")
            if last == "dlopen" and module.name not in OPENS:
                yield Violation(module.name, line, f"calls {name}; llama_native/library.py is the one door")


def codec_reads_no_files(house: House) -> Iterator[Violation]:
    """The codec maps files in load and opens none elsewhere, and takes raw bytes apart in cursor alone."""
    for module in house.modules.values():
        if not module.name.startswith("statecodec"):
            continue
        for name, line in uses(module.tree):
            last = name.rpartition(".")[2]
            maps = last == "memmap" and module.name == "statecodec.load"
            if name in _OPENERS or (last in {"memmap", "fromfile", "tofile"} and not maps):
                yield Violation(module.name, line, f"uses {name}; bytes come in, views or bytes go out")
            if last in {"from_bytes", "unpack", "unpack_from", "iter_unpack"} and module.name != "statecodec.cursor":
                yield Violation(module.name, line, f"uses {name}; raw bytes are taken apart in cursor alone")
        for node in ast.walk(module.tree):
            # The whole of a piece that cursor cut may be seen as an array; cutting one here may not.
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).endswith("frombuffer")
                and (
                    isinstance(node.args[0], ast.Subscript)
                    or {k.arg for k in node.keywords} - {"dtype"}
                    or node.args[2:]
                )
                and module.name != "statecodec.cursor"
            ):
                yield Violation(module.name, node.lineno, f"`{ast.unparse(node)}`: raw bytes are cut in cursor alone")


def pure_modules_are_pure(house: House) -> Iterator[Violation]:
    """The table of the switch, its refusals and the planner's arithmetic: same input, same output."""
    for module in house.modules.values():
        if not module.is_pure:
            continue
        for found in house.imports(module):
            if found.top in IMPURE_STANDARD and not found.typing_only:
                yield Violation(module.name, found.line, f"imports {found.target}; this module is pure")
        for name, line in uses(module.tree):
            if name in {"open", "input", "print"} or name.startswith(("np.random", "numpy.random")):
                yield Violation(module.name, line, f"uses {name}; this module is pure")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Global):
                yield Violation(module.name, node.lineno, "changes a global; this module is pure")


def the_command_line_alone_speaks(house: House) -> Iterator[Violation]:
    """The command line alone prints, exits, reads argv and environment; so do process entries, as children."""
    said = re.compile(
        r"print|input|breakpoint|exit|quit|sys\.(exit|argv|stdin|stdout|stderr|__std\w+)"
        r"|os\.(environ\w*|getenv\w*|putenv|_exit|abort)"
    )
    for module in house.modules.values():
        if module.is_one_of(SPEAKS):
            continue
        for name, line in uses(module.tree):
            if name.startswith("os.environ") and module.name in READS_ENVIRONMENT:
                continue
            if said.fullmatch(name):
                yield Violation(
                    module.name, line, f"uses {name}; cli alone speaks, exits and reads argv and environment"
                )
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and node.module in {"os", "sys"}:
                for alias in node.names:
                    if said.fullmatch(f"{node.module}.{alias.name}"):
                        yield Violation(
                            module.name, node.lineno, f"takes {alias.name} from {node.module}; cli alone does"
                        )


def importing_does_nothing(house: House) -> Iterator[Violation]:
    """A module body defines; it calls nothing for its effect and changes nothing that belongs to others."""
    for module in house.modules.values():
        for node in module.tree.body:
            if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
                # Naming the commands of the command line is a definition that click has no other form for.
                registers = isinstance(node.value, ast.Call) and ast.unparse(node.value.func).endswith(".add_command")
                if not (registers and module.folder == "cli"):
                    yield Violation(module.name, node.lineno, f"does `{ast.unparse(node)}` when it is imported")
            elif isinstance(node, ast.With | ast.For | ast.While | ast.Delete | ast.Raise):
                yield Violation(module.name, node.lineno, "acts when it is imported")
            elif isinstance(node, ast.Assign) and not all(isinstance(t, ast.Name | ast.Tuple) for t in node.targets):
                yield Violation(module.name, node.lineno, f"sets `{ast.unparse(node)}` when it is imported")


def modules_say_one_thing(house: House) -> Iterator[Violation]:
    """A module has a docstring and 600 lines at most, and is finished."""
    for module in house.modules.values():
        n_lines = len(module.source.splitlines())
        if n_lines > MAX_LINES:
            yield Violation(module.name, n_lines, f"has {n_lines} lines, {MAX_LINES} at most")
        if not ast.get_docstring(module.tree):
            yield Violation(module.name, 0, "has no docstring")
        for name, line in uses(module.tree):
            if name == "NotImplementedError":
                yield Violation(module.name, line, "leaves something out")


RULES: tuple[Rule, ...] = (
    leaves_do_not_see_each_other,
    only_declared_packages,
    imports_go_down,
    no_import_cycles,
    leaves_are_used_where_said,
    leaves_are_entered_by_the_front,
    native_objects_stay_inside,
    codec_reads_no_files,
    pure_modules_are_pure,
    the_command_line_alone_speaks,
    importing_does_nothing,
    modules_say_one_thing,
)


# ---- tests are judged as well ----


def faults_of_tests(path: Path, source: str) -> Iterator[Violation]:
    """Tests without their sentence, and tests that wait for a clock.

    Args:
        path: Of the test file, for the message.
        source: Its text.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            sentence = ast.get_docstring(node)
            if sentence is None or "\n" in sentence.strip():
                yield Violation(str(path), node.lineno, f"{node.name} has no docstring of one sentence")
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "sleep":
            yield Violation(str(path), node.lineno, "sleeps; wait for the event instead")
