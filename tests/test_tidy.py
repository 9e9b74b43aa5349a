"""Rules of the house as a test: sizes, names, exports, and what may not appear in source.

Every exception is listed here with its reason, and a listed exception that is no longer needed fails too.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
PARAMETERS_MAX = 6
FORBIDDEN_WORDS = frozenset({"manager", "managers", "helper", "helpers", "util", "utils", "common", "misc"})
MARKS = tuple(a + b for a, b in (("TO", "DO"), ("FIX", "ME"), ("XX", "X"), ("HA", "CK")))

# Written by protoc; tests/wire/test_protos.py holds it to its source.
GENERATED = ("store_pb2", "routing_pb2")

# function (module:name) → why it needs more than PARAMETERS_MAX parameters.
MANY_PARAMETERS = {
    "kvstore/block_tables.py:commit": "one parameter per field of the Commit message, and who asks",
    "kvstore/client/face.py:Face.__init__": "public constructor: all but three are keyword-only",
    "connectors/embedded/attach.py:connect": "four things to connect; the rest is keyword-only",
}
# function (module:name) → why it may take **keywords.
KEYWORDS = {
    f"connectors/vllm/connector.py:KVStoreConnector.{hook}": "vLLM's hook: it passes what its runner has"
    for hook in ("start_load_kv", "save_kv_layer")
}
# module → why it may print.
PRINTERS = {
    "kvstore/cli/answers.py": "a command's answer goes to stdout",
    "connectors/embedded/demo.py": "what the demo shows goes to stdout",
}
# module → why it declares no __all__.
NO_EXPORTS = {"kvstore/__main__.py": "a program, not a module to import"}


def files(*patterns: str) -> list[Path]:
    found = sorted({p for pattern in patterns for p in ROOT.glob(pattern) if p.is_file()})
    return [p for p in found if "__pycache__" not in p.parts and not p.name.startswith(GENERATED)]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


PACKAGE = files("kvstore/**/*.py", "connectors/**/*.py")
PYTHON = PACKAGE + files("tests/**/*.py", "bench/**/*.py", "tools/**/*.py", "examples/**/*.py")
NATIVE = files("native/**/*.cc", "native/**/*.h", "native/**/*.cu")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@functools.cache
def comments_of(path: Path) -> dict[int, str]:
    with tokenize.open(path) as lines:
        tokens = tokenize.generate_tokens(lines.readline)
        return {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[tuple[str, Function]]:
    """Every function with its dotted name."""

    def below(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            name = f"{prefix}{getattr(child, 'name', '')}"
            if isinstance(child, Function):
                yield name, child
            is_scope = isinstance(child, Function | ast.ClassDef)
            yield from below(child, f"{name}." if is_scope else prefix)

    yield from below(tree_of(path), "")


def agree(found: dict[str, object], allowed: dict[str, str], rule: str) -> None:
    """Fails for what is found without leave, and for leave that nobody needs."""
    unexpected = {name: what for name, what in found.items() if name not in allowed}
    assert not unexpected, f"{rule}: {unexpected}"
    assert not allowed.keys() - found.keys(), f"{rule}: exceptions that are no longer needed"


def annotated(node: ast.ClassDef) -> set[str]:
    """Attributes that a class body declares."""
    return {m.target.id for m in node.body if isinstance(m, ast.AnnAssign) and isinstance(m.target, ast.Name)}


def test_there_is_something_to_check() -> None:
    assert len(PACKAGE) > 30
    assert len(NATIVE) > 20


# ---- sizes ------------------------------------------------------------------------------------------------


def test_files_are_short() -> None:
    paths = PYTHON + NATIVE + files("kvstore/**/*.pyi")
    long = {name_of(p): n for p in paths if (n := len(p.read_text().splitlines())) > FILE_LINES_MAX}
    agree(long, {}, f"files of more than {FILE_LINES_MAX} lines")


def test_functions_are_short() -> None:
    long = {
        f"{name_of(path)}:{name}": lines
        for path in PYTHON
        for name, node in functions(path)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    }
    agree(long, {}, f"functions of more than {FUNCTION_LINES_MAX} lines")


def test_functions_take_few_parameters() -> None:
    many: dict[str, object] = {}
    for path in PACKAGE:
        for name, node in functions(path):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len([a for a in given if a.arg not in ("self", "cls")])
            if count > PARAMETERS_MAX:
                many[f"{name_of(path)}:{name}"] = count
    agree(many, MANY_PARAMETERS, f"functions with more than {PARAMETERS_MAX} parameters")


# ---- exports ----------------------------------------------------------------------------------------------


def defined(path: Path) -> set[str]:
    """Names bound at the top level of a module, imports included."""
    names: set[str] = set()
    todo: list[ast.stmt] = list(tree_of(path).body)
    while todo:
        node = todo.pop()
        if isinstance(node, Function | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.If | ast.Try):
            inner = [node.body, node.orelse, *(h.body for h in getattr(node, "handlers", []))]
            todo += [s for block in inner for s in block]
    return names


def exported(path: Path) -> list[str] | None:
    for node in tree_of(path).body:
        if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    return None


def export_order(name: str) -> tuple[int, str]:
    """CONSTANTS, Classes, functions: ruff's isort style, so that both agree."""
    if name.isupper() and len(name) > 1:
        return 0, name
    return (1 if name[:1].isupper() else 2), name


def is_bare(path: Path) -> bool:
    """Nothing but a docstring."""
    return all(isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant) for n in tree_of(path).body)


def test_every_module_declares_what_it_offers() -> None:
    absent = {name_of(p): "" for p in PACKAGE if exported(p) is None and not is_bare(p)}
    agree(absent, NO_EXPORTS, "modules without __all__")


@pytest.mark.parametrize("path", [p for p in PACKAGE if exported(p) is not None], ids=name_of)
def test_exports_exist_and_are_sorted(path: Path) -> None:
    names = exported(path)
    assert names is not None
    assert names == sorted(set(names), key=export_order)
    assert not set(names) - defined(path), "named in __all__ but not defined"


def test_every_module_says_what_it_is_for() -> None:
    silent = [name_of(p) for p in PYTHON if not ast.get_docstring(tree_of(p))]
    assert not silent, f"modules without a docstring: {silent}"


# ---- words ------------------------------------------------------------------------------------------------

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def words(name: str) -> set[str]:
    return {w.lower() for w in _WORD.findall(name)}


def names_given(path: Path) -> set[str]:
    """Names that a module invents: definitions, parameters, variables and attributes."""
    names = set(path.relative_to(ROOT).with_suffix("").parts)
    for node in ast.walk(tree_of(path)):
        if isinstance(node, Function | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def native_code(path: Path) -> str:
    """Source without comments and string literals."""
    text = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', path.read_text())
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def test_names_use_the_words_of_the_design() -> None:
    bad = {
        f"{name_of(path)}:{name}"
        for path in PYTHON
        for name in names_given(path)
        if words(name) & FORBIDDEN_WORDS
    }
    for path in NATIVE:
        given = {path.stem, *re.findall(r"[A-Za-z_]\w*", native_code(path))}
        bad |= {f"{name_of(path)}:{name}" for name in given if words(name) & FORBIDDEN_WORDS}
    assert not bad


# ---- what may not appear ----------------------------------------------------------------------------------


def test_no_escape_hatches() -> None:
    hatches: dict[str, object] = {
        f"{name_of(path)}:{name}": f"**{node.args.kwarg.arg}"
        for path in PACKAGE
        for name, node in functions(path)
        if node.args.kwarg is not None
    }
    agree(hatches, KEYWORDS, "functions that take any keyword")
    extra = [name_of(p) for p in PACKAGE if "extra_config" in names_given(p)]
    assert not extra


def test_broad_excepts_give_a_reason() -> None:
    silent = []
    for path in PYTHON:
        comments = comments_of(path)
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = ast.unparse(node.type) if node.type is not None else ""
            if caught and not re.search(r"\b(Base)?Exception\b", caught):
                continue
            near = [comments.get(line, "") for line in range(node.lineno - 1, node.lineno + 2)]
            reasons = [re.sub(r"(noqa|type: ignore|pragma)\S*( BLE001)?", "", text) for text in near]
            if not any(len(reason.split()) >= 3 for reason in reasons):
                silent.append(f"{name_of(path)}:{node.lineno}")
    assert not silent, f"except without a named error or a reason: {silent}"


def test_nothing_is_left_for_later() -> None:
    mark = re.compile(r"\b(" + "|".join(MARKS) + r")\b")
    found = [name_of(p) for p in PYTHON + NATIVE + files("kvstore/**/*.pyi") if mark.search(p.read_text())]
    assert not found


def calls(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


def test_time_is_monotonic() -> None:
    wall = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now"}
    found = [f"{name_of(p)}:{line}" for p in PACKAGE for line, name in calls(p) if name in wall]
    imported = [
        name_of(p)
        for p in PACKAGE
        for node in ast.walk(tree_of(p))
        if isinstance(node, ast.ImportFrom)
        and node.module == "time"
        and "time" in {a.name for a in node.names}
    ]
    assert not found + imported


def test_tests_wait_for_events_instead_of_sleeping() -> None:
    found = [
        f"{name_of(p)}:{line}"
        for p in files("tests/**/*.py")
        for line, name in calls(p)
        if name == "time.sleep"
    ]
    assert not found


def test_only_programs_print() -> None:
    printing: dict[str, object] = {
        name_of(p): line for p in PACKAGE for line, name in calls(p) if name in ("print", "sys.stdout.write")
    }
    agree(printing, {k: v for k, v in PRINTERS.items() if (ROOT / k).exists()}, "modules that print")


def test_nothing_runs_at_import() -> None:
    """A module's top level defines; it opens, starts and configures nothing."""
    loud = [
        f"{name_of(path)}:{node.lineno}"
        for path in PACKAGE
        if name_of(path) not in NO_EXPORTS
        for node in tree_of(path).body
        if (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
        or isinstance(node, ast.For | ast.While | ast.With)
    ]
    assert not loud


# ---- the native stub --------------------------------------------------------------------------------------


def stub() -> dict[str, set[str] | None]:
    """Public names of the stub; for a class the names of its members, else None."""
    names: dict[str, set[str] | None] = {}
    files = [ROOT / f"kvstore/_native{part}.pyi" for part in ("", "_disk", "_router")]
    for node in [node for file in files for node in tree_of(file).body]:
        if isinstance(node, ast.ClassDef):
            members = {m.name for m in node.body if isinstance(m, Function)}
            members |= annotated(node)
            names[node.name] = members - {"__init__"}
        elif isinstance(node, Function):
            names[node.name] = None
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = None
    return names


def test_the_stub_is_the_module() -> None:
    native = importlib.import_module("kvstore._native")
    assert stub().keys() == {name for name in dir(native) if not name.startswith("_")}


@pytest.mark.parametrize("name", [name for name, members in stub().items() if members is not None])
def test_the_stub_knows_every_member(name: str) -> None:
    native = importlib.import_module("kvstore._native")
    members = stub()[name]
    assert members is not None
    real = vars(getattr(native, name))
    public = {member for member in real if not member.startswith("_")}
    assert {m for m in members if not m.startswith("_")} == public
    assert {m for m in members if m.startswith("_")} <= real.keys()


# ---- the README -------------------------------------------------------------------------------------------


def test_readme_names_every_command() -> None:
    commands = importlib.import_module("kvstore.cli").COMMANDS
    assert len(commands) >= 8
    readme = (ROOT / "README.md").read_text()
    assert not [c for c in commands if f"kvstore {c}" not in readme]


def test_readme_names_every_configuration_key() -> None:
    files = (ROOT / "kvstore/config/tables.py", ROOT / "kvstore/config/tenancy.py")
    tables = {n.name: n for file in files for n in tree_of(file).body if isinstance(n, ast.ClassDef)}
    readme = (ROOT / "README.md").read_text()
    missing = []
    for table, node in tables.items():
        if table in ("TenantConfig", "SharedConfig", "Quota"):  # of arrays: their keys are shown by examples
            shown = {key for key in annotated(node) if re.search(rf"`{key}`|^{key} = ", readme, re.MULTILINE)}
            missing += [f"{table}.{key}" for key in sorted(set(annotated(node)) - shown)]
            continue
        if not table.endswith("Config") or table == "Config":
            continue
        prefix = table.removesuffix("Config").lower()
        missing += [f"{prefix}.{key}" for key in sorted(annotated(node)) if f"{prefix}.{key}" not in readme]
    assert not missing


def test_make_has_the_two_commands() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^demo:", makefile, re.MULTILINE)
    assert re.search(r"^test:", makefile, re.MULTILINE)


def test_the_suite_treats_warnings_as_errors() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert settings["filterwarnings"][0] == "error"
    assert 0 < settings["timeout"] <= 300
